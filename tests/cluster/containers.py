"""Stand-ins for apptainer and for srun with pyxis: what they do to a process, done with Linux's own means.

An image is a text file. Its lines are directories of this machine, which are all that the container has, or variables
of the image (``NAME=value``). Root alone can make it a root directory of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

CLONE_NEWNS = 0x20000
# Every program gets these from the runtime.
_FROM_HOST = ("/dev", "/proc")
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/opt")


@dataclass
class Container:
    """One container.

    Attributes:
        image: its image.
        workdir: where its process starts.
        mounts: source, target and flags of each mount.
        kept: variables whose values outside win over those of the image.
    """

    image: Path = Path()
    workdir: str = "/"
    mounts: list[list[str]] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)

    def enter(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Become a command in the container."""
        lines = self.image.read_text().splitlines()
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), "unshare")
        root = Path(tempfile.mkdtemp(prefix="container-"))
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "none", root], check=True)
        (root / "tmp").mkdir()
        for place in (*_FROM_HOST, *(line for line in lines if line.startswith("/"))):
            _show(root, place, place)
        for source, *rest in self.mounts:
            _show(root, source, rest[0] if rest else source, *rest[1:])
        os.chroot(root)
        os.chdir(self.workdir)
        of_image = dict(line.split("=", 1) for line in lines if not line.startswith("/"))
        variables = {**environment, **of_image, **self.kept}
        # A Go program leaves no signal ignored to its children, SIGHUP and SIGINT aside (os/signal).
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        os.execvpe(command[0], list(command), variables)


def _show(root: Path, source: str, target: str, *flags: str) -> None:
    """Let a container see a file or directory."""
    inside = Path(f"{root}{target}")
    if Path(source).is_symlink():
        inside.symlink_to(Path(source).readlink())
        return
    if Path(source).is_dir():
        inside.mkdir(parents=True, exist_ok=True)
    else:
        inside.parent.mkdir(parents=True, exist_ok=True)
        inside.touch()
    subprocess.run(["mount", "--rbind", source, inside], check=True)
    if "ro" in flags:
        subprocess.run(["mount", "-o", "remount,bind,ro", inside], check=True)


def apptainer(words: list[str]) -> int:
    """Run ``apptainer exec``: a process that watches the container and passes signals on, as the real one does."""
    container, nvidia, is_evaluated = Container(), False, True
    verb = words.pop(0)
    while words[0].startswith("--"):
        option = words.pop(0)
        if option == "--no-eval":
            is_evaluated = False
        elif option == "--nv":
            nvidia = True
        elif option == "--pwd":
            container.workdir = words.pop(0)
        elif option == "--bind":
            container.mounts.append(words.pop(0).split(":"))
        else:
            raise SystemExit(f"FATAL:   unknown option {option}")
    container.image = Path(words.pop(0))
    if verb != "exec" or nvidia or not container.image.is_file():
        raise SystemExit(f"FATAL:   could not open image {container.image}")
    if is_evaluated:
        raise SystemExit("FATAL:   a shell would evaluate the variables of the container")
    prefix = "APPTAINERENV_"
    container.kept = {name.removeprefix(prefix): os.environ[name] for name in os.environ if name.startswith(prefix)}
    child = os.fork()
    if child == 0:
        container.enter(words, os.environ)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, lambda got, _: os.kill(child, got))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


def srun(real: str, words: list[str]) -> None:
    """Run srun; the options of pyxis are taken off, and each task enters the container by itself."""
    if words == ["--help"]:
        sys.stdout.write("      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH\n")
        return
    options = {word.partition("=")[0]: word.partition("=")[2] for word in words if word.startswith("--container-")}
    if not options:
        os.execv(real, [real, *words])
    others = [word for word in words if not word.startswith("--container-")]
    command = next(index for index, word in enumerate(others) if not word.startswith("--"))
    enter = [sys.executable, "-P", __file__, "pyxis", *(f"{name}={value}" for name, value in options.items())]
    os.execv(real, [real, *others[:command], *enter, *others[command:]])


def pyxis(words: list[str]) -> None:
    """Be a task that enters its container: no process stays between."""
    options = dict(words.pop(0).split("=", 1) for _ in [word for word in words if word.startswith("--container-")])
    names = filter(None, options.get("--container-env", "").split(","))
    Container(
        image=Path(options["--container-image"]),
        workdir=options["--container-workdir"],
        mounts=[mount.split(":") for mount in options["--container-mounts"].split(",")],
        kept={name: os.environ[name] for name in names},
    ).enter(words, os.environ)


def install(directory: Path) -> None:
    """Put ``apptainer`` and ``srun`` into a directory."""
    real = shutil.which("srun")
    for name, more in (("apptainer", ""), ("srun", f" '{real}'")):
        program = directory / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P "{__file__}" {name}{more} "$@"\n')
        program.chmod(0o755)


def write_image(path: Path, *places: str | Path, **variables: str) -> Path:
    """Write an image of the operating system, this interpreter, and more places."""
    known = dict.fromkeys(map(str, (*_SYSTEM, sys.prefix, sys.base_prefix, *places)))
    seen = {"PATH": f"{sys.prefix}/bin:/usr/bin:/bin", **variables}
    lines = [*(place for place in known if Path(place).exists()), *(f"{name}={value}" for name, value in seen.items())]
    path.write_text("\n".join(lines))
    return path


if __name__ == "__main__":
    program, *arguments = sys.argv[1:]
    if program == "apptainer":
        sys.exit(apptainer(arguments))
    elif program == "srun":
        srun(arguments[0], arguments[1:])
    else:
        pyxis(arguments)
