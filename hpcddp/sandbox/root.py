"""Another Slurm: the root directory of a Linux with Slurm in it, which a sandbox can run in.

``python -m hpcddp.sandbox.root ROOT COMMAND ...`` runs a command there; its caller has given it a mount namespace of
its own (``unshare --mount``). The system directories are those of ROOT, read-only; everything else, and with it the
interpreter, the environment and the user's files, is this machine's. Nothing is written to ROOT.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

import hpcddp
from hpcddp.errors import HpcddpError, UserError
from hpcddp.sandbox import programs
from hpcddp.sandbox.programs import Command

# The directories of a system (hier(7)), and those whose names begin with lib.
_SYSTEM = frozenset({"bin", "sbin", "usr", "etc", "var", "run", "proc", "sys", "dev", "boot", "lost+found"})
# The prefix of the system's own interpreter.
_SYSTEM_PREFIX = Path("/usr")
_KERNEL = ("proc", "sys", "dev")
# In /etc these are this machine's, so that its users exist and times are in its time zone.
_MACHINE_FILES = ("passwd", "group", "hosts", "hostname", "resolv.conf", "localtime")
# The directory in ROOT that the new root directory is built on.
_MOUNT_POINT = "mnt"
_DIRECTORIES = ("etc", "usr", "var", _MOUNT_POINT)
_PROGRAMS = ("slurmctld", "slurmd", "sinfo", "munged", "ip", "hostname", "mount", "umount", "unshare", "nsenter", "env")
_EXAMPLE = "give the root directory of a Linux with Slurm in it, such as scripts/slurm-root makes"


def check(root: Path) -> None:
    """Reject a directory in which no Slurm, or not this interpreter, can run.

    Args:
        root: an absolute path without symbolic links.

    Raises:
        UserError: for the first error; says what to do instead.
    """
    if root == Path("/"):
        raise UserError("--slurm is /, which is this machine's own root directory; leave it out")
    if not root.exists():
        raise UserError(f"--slurm is {root}, which does not exist; {_EXAMPLE}")
    if not root.is_dir():
        raise UserError(f"--slurm is {root}, which is a file; {_EXAMPLE}")
    _check_owner(root, root)
    for name in _DIRECTORIES:
        if not (root / name).is_dir():
            raise UserError(f"--slurm is {root}, which has no directory /{name}; {_EXAMPLE}")
    missing = [name for name in _PROGRAMS if find_program(root, name) is None]
    if missing:
        raise UserError(f"--slurm is {root}, which lacks {' and '.join(missing)}; {_EXAMPLE}")
    for name in _PROGRAMS:
        program = find_program(root, name)
        if program is not None:
            _check_owner(root, root / program.relative_to("/"))
    _check_interpreter(root)


def is_shared(path: Path) -> bool:
    """Return whether a path of this machine is the same file in every root: it is in no system directory."""
    top = path.resolve().parts[1:2]
    return bool(top) and not _is_system(top[0])


def find_program(root: Path, name: str) -> Path | None:
    """Return the path that a program of ``root`` has inside of it, or None."""
    for directory in programs.PATH.split(os.pathsep):
        # A link in it may lead to a file that exists only inside.
        if os.path.lexists(f"{root}{directory}/{name}"):
            return Path(directory, name)
    return None


def command_in(root: Path, command: Sequence[str]) -> tuple[str, ...]:
    """Return the command line that runs ``command`` in ``root``, for use in a mount namespace of its own."""
    return (sys.executable, "-P", "-m", "hpcddp.sandbox.root", str(root), *command)


def enter(root: Path) -> None:
    """Make ``root`` the root directory of this process and of its mount namespace."""
    new = root / _MOUNT_POINT
    # Unbindable: a directory of this machine that holds ROOT is bound below, and must not hold this mount again.
    _mount("--types", "tmpfs", "--options", "mode=755", "--make-unbindable", "tmpfs", str(new))
    for entry in root.iterdir():
        if _is_system(entry.name) and entry.name not in {*_KERNEL, "etc", "run", "boot", "lost+found"}:
            _show(entry, new / entry.name, "--bind", "--options", "ro")
    _write_etc(root, new / "etc")
    (new / "run").mkdir()
    for name in _KERNEL:
        _show(Path("/", name), new / name, "--rbind")
    for entry in Path("/").iterdir():
        if entry.is_dir() and not _is_system(entry.name):
            _show(entry, new / entry.name, "--rbind")
    for directory in _other_directories():
        _show(directory, new / directory.relative_to("/"), "--rbind")
    _change_root(new)


def main(root: Path, command: Sequence[str]) -> None:
    """Replace this process by a command in ``root``, in the same working directory; returns only if it fails."""
    working_directory = Path.cwd()
    check(root)
    enter(root)
    # Only a new process has the libraries of the new root.
    os.chdir(working_directory)
    os.execvp(command[0], list(command))  # noqa: S606  replaces this process on purpose


def _is_system(name: str) -> bool:
    return name in _SYSTEM or name.startswith("lib")


def _check_owner(root: Path, path: Path) -> None:
    """Reject a file that somebody else could replace: the user, who is root, runs the programs."""
    status = path.lstat()
    if status.st_uid != os.geteuid():
        raise UserError(
            f"--slurm is {root}, and {path} is user {status.st_uid}'s, who could put other programs there; "
            "give a directory of your own"
        )
    if not stat.S_ISLNK(status.st_mode) and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UserError(
            f"--slurm is {root}, and {path} can be written by others, who could put other programs there; "
            f"run: chmod go-w {path}"
        )


def _check_interpreter(root: Path) -> None:
    missing = [path for path in _other_directories() if not _has_mount_point(root, path)]
    interpreter = Path(sys.executable).resolve()
    is_the_systems = Path(sys.base_prefix).resolve() == _SYSTEM_PREFIX
    if is_the_systems and not os.path.lexists(f"{root}{interpreter}"):
        missing.insert(0, interpreter)
    if missing:
        raise UserError(
            f"--slurm is {root}, and the Python that runs hpcddp needs {missing[0]}, which that root does not have; "
            "use an environment whose Python is not the system's, for example one of uv: "
            "uv venv --managed-python"
        )


def _has_mount_point(root: Path, path: Path) -> bool:
    """Return whether a directory of this machine can be shown in the new root: only /etc and /run are written anew."""
    return path.parts[1] in {"etc", "run"} or (root / path.relative_to("/")).is_dir()


def _other_directories() -> list[Path]:
    """Return the directories of the interpreter, its environment and this package that are in system directories.

    An interpreter of the system itself is not among them: the system is the root's.
    """
    needed = (Path(prefix).resolve() for prefix in (sys.base_prefix, sys.prefix, Path(hpcddp.__file__).parent))
    return [path for path in dict.fromkeys(needed) if path != _SYSTEM_PREFIX and not is_shared(path)]


def _write_etc(root: Path, etc: Path) -> None:
    shutil.copytree(root / "etc", etc, symlinks=True)
    for name in _MACHINE_FILES:
        source = Path("/etc", name)
        if source.exists():
            (etc / name).unlink(missing_ok=True)
            shutil.copyfile(source, etc / name)


def _show(source: Path, target: Path, *options: str) -> None:
    """Make a directory visible at another place, or copy a symbolic link."""
    if source.is_symlink():
        target.symlink_to(source.readlink())
        return
    target.mkdir(parents=True, exist_ok=True)
    _mount(*options, str(source), str(target))


def _change_root(new: Path) -> None:
    old = "old-root"
    (new / old).mkdir()
    os.chdir(new)
    # pivot_root(2) of the C library: newer systems do not install pivot_root(8).
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.pivot_root(b".", old.encode()):
        reason = os.strerror(ctypes.get_errno())
        raise programs.ProcessError(f"{new} cannot become the root directory: pivot_root failed ({reason})")
    os.chdir("/")
    _run("umount", "--lazy", f"/{old}")
    Path("/", old).rmdir()
    _mount("--make-private", "/")


def _mount(*words: str) -> None:
    _run("mount", *words)


def _run(*argv: str) -> None:
    programs.run(Command(argv=argv), {**os.environ, "PATH": programs.PATH})


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2:])
    except HpcddpError as error:
        sys.stderr.write(f"{error.message}\n")
        sys.exit(error.exit_code)
