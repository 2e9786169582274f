"""``hpcddp doctor install`` on one machine: interpreter, torch, CUDA, NCCL, Slurm, run root and file system."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Literal

from hpcddp.errors import counted
from hpcddp.packages import is_installed, missing_packages
from hpcddp.slurm import commands
from hpcddp.slurm.controller import OLDEST, version_of, visible_differences
from hpcddp.task.stacks import find_py_spy
from hpcddp.version import __version__

Verdict = Literal["ok", "warning", "error"]

_TORCH_TIMEOUT_S: Final = 90.0
# The first import from a network file system takes minutes at worst; the answer is the last line.
_ASK_TORCH: Final = """\
import json, torch
from torch import cuda, version
found = {"torch": str(torch.__version__), "cuda": version.cuda, "gpus": cuda.device_count(), "nccl": None}
try:
    from torch.cuda import nccl
    found["nccl"] = ".".join(str(part) for part in nccl.version()) if version.cuda else None
except Exception:
    pass
print(json.dumps(found))
"""
# File systems that belong to one machine (mount(8)).
_LOCAL: Final = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check found.

    Args:
        verdict: an error keeps runs from working; a warning may.
        remedy: what to do about it; None if there is nothing to do.
    """

    name: str
    verdict: Verdict
    found: str
    remedy: str | None = None

    def __str__(self) -> str:
        sentence = f"{self.verdict:<8} {self.name:<12} {self.found}"
        return f"{sentence}; {self.remedy}" if self.remedy else sentence


def examine_machine(run_root: Path, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings about this machine.

    Args:
        run_root: the directory of all runs; it need not exist.
        environment: the environment of Slurm's commands.
    """
    yield Finding(
        name="python",
        verdict="ok",
        found=f"Python {platform.python_version()}, {sys.executable}, hpcddp {__version__}",
    )
    if not is_installed("torch"):
        yield Finding(
            name="torch",
            verdict="warning",
            found=missing_packages("a training", ["torch"], sys.executable),
            remedy="a plain command needs no torch here",
        )
    else:
        yield from torch_findings(ask_torch(sys.executable))
    yield _slurm(environment)
    yield _py_spy(environment)
    yield _run_root(run_root)


def ask_torch(python: str) -> dict[str, Any]:
    """Return what torch says in a process of its own: ``torch``, ``cuda``, ``gpus``, ``nccl``; or ``error``, a text."""
    try:
        done = subprocess.run(
            [python, "-P", "-c", _ASK_TORCH],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TORCH_TIMEOUT_S,
            check=False,
        )
        answer = json.loads(_last_line(done.stdout))
    except subprocess.TimeoutExpired:
        return {"error": f"import torch took more than {_TORCH_TIMEOUT_S:.0f} s"}
    except OSError as error:
        return {"error": f"{python} cannot be started: {error.strerror}"}
    except ValueError:
        return {"error": f"import torch failed: {_last_line(done.stderr) or 'it said nothing'}"}
    return dict(answer)


def _last_line(output: str) -> str:
    """Return the last line that is not blank; empty if there is none."""
    lines = output.strip().splitlines()
    return lines[-1].strip() if lines else ""


def torch_findings(answer: Mapping[str, Any], *, where: str = "") -> Iterator[Finding]:
    """Yield the findings about torch, CUDA and NCCL.

    Args:
        answer: what ``ask_torch`` returned.
        where: in front of what was found, such as ``n1: ``.
    """
    if "error" in answer:
        yield Finding(
            name="torch",
            verdict="error",
            found=f"{where}{answer['error']}",
            remedy="install torch again as pytorch.org describes for this machine",
        )
        return
    version = str(answer["torch"])
    oldest = _oldest_torch()
    if oldest is not None and _release(version) < oldest:
        remedy = f"hpcddp needs {'.'.join(map(str, oldest))} or later"
        yield Finding(name="torch", verdict="error", found=f"{where}torch {version}", remedy=remedy)
    else:
        yield Finding(name="torch", verdict="ok", found=f"{where}torch {version}")
    if answer["cuda"] is None:
        yield Finding(
            name="cuda",
            verdict="warning",
            found=f"{where}this torch is built without CUDA",
            remedy="for GPUs install the build for CUDA (pytorch.org)",
        )
        return
    gpus = "no GPU here, as usual on a login node"
    if answer["gpus"]:
        gpus = f"{counted(answer['gpus'], 'GPU')} here"
    yield Finding(name="cuda", verdict="ok", found=f"{where}CUDA {answer['cuda']}, {gpus}")
    if answer["nccl"] is None:
        yield Finding(
            name="nccl",
            verdict="error",
            found=f"{where}this torch has no NCCL",
            remedy="several GPUs need it: install the build of pytorch.org",
        )
    else:
        yield Finding(name="nccl", verdict="ok", found=f"{where}NCCL {answer['nccl']}")


def _oldest_torch() -> tuple[int, ...] | None:
    """Return the lower bound of torch in the metadata of hpcddp; None where hpcddp is not installed as a package."""
    try:
        requirements = metadata.requires("hpcddp") or []
    except metadata.PackageNotFoundError:
        return None
    for requirement in requirements:
        bound = re.match(r"torch\s*>=\s*([0-9.]+)", requirement)
        if bound is not None:
            return _release(bound[1])
    return None


def _release(version: str) -> tuple[int, ...]:
    """Return major and minor version; a pre-release counts as its release."""
    return tuple(int(number) for number in re.findall(r"[0-9]+", version)[:2])


def _slurm(environment: Mapping[str, str]) -> Finding:
    try:
        version = commands.ask("sinfo", "--version", environment=environment).strip().rpartition(" ")[2]
    except commands.SlurmMissingError:
        return _no_slurm("sinfo was not found")
    except commands.SlurmCommandError as error:
        if commands.NO_CONFIGURATION in error.message:
            return _no_slurm("Slurm's commands find no slurm.conf")
        return Finding(name="slurm", verdict="error", found=error.message, remedy="ask your site")
    if not commands.controller_answers(environment):
        return Finding(
            name="slurm",
            verdict="error",
            found=f"Slurm {version}, whose controller does not answer",
            remedy="try scontrol ping; jobs cannot be submitted until it answers",
        )
    differences = "; ".join([f"Slurm {version}", *visible_differences(version)])
    if version_of(version) < version_of(OLDEST):
        remedy = f"hpcddp needs Slurm {OLDEST} or later"
        return Finding(name="slurm", verdict="warning", found=differences, remedy=remedy)
    return Finding(name="slurm", verdict="ok", found=differences)


def _no_slurm(reason: str) -> Finding:
    return Finding(
        name="slurm",
        verdict="warning",
        found=f"no Slurm here: {reason}",
        remedy="run this on a login node; without Slurm, hpcddp submit --cluster local works",
    )


def _py_spy(environment: Mapping[str, str]) -> Finding:
    """Return whether ``hpcddp stacks`` can read the program of a command, which nothing else needs."""
    program = find_py_spy(environment.get("PATH", os.defpath))
    if program is None:
        remedy = "hpcddp stacks needs it for the program of a command: pip install py-spy"
        return Finding(name="py-spy", verdict="ok", found="no py-spy here", remedy=remedy)
    return Finding(name="py-spy", verdict="ok", found=program)


def _run_root(run_root: Path) -> Finding:
    directory = existing_part(run_root)
    kind = file_system(directory)
    try:
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        return Finding(
            name="run root",
            verdict="error",
            found=f"{run_root.absolute()} cannot be written ({error.strerror})",
            remedy="write another run_root into hpcddp.yaml or the profile",
        )
    found = f"{run_root.absolute()} is on {kind}"
    if kind in _LOCAL:
        return Finding(
            name="run root",
            verdict="warning",
            found=f"{found}, which one machine usually has for itself",
            remedy="hpcddp doctor install --on-nodes shows whether the nodes see it",
        )
    return Finding(name="run root", verdict="ok", found=found)


def existing_part(path: Path) -> Path:
    """Return the path, or the nearest directory above it that exists."""
    path = path.absolute()
    return next(parent for parent in (path, *path.parents) if parent.is_dir())


def file_system(path: Path, table: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the type of the file system that holds a path, such as ``nfs4`` (proc(5), mountinfo)."""
    longest = ""
    kind = "an unknown file system"
    resolved = f"{path.resolve()}/"
    for line in table.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        mount, _, after = line.partition(" - ")
        # Blanks in a path are written as \040.
        mount_point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), mount.split()[4])
        # A later line covers an earlier one.
        if resolved.startswith(f"{mount_point.rstrip('/')}/") and len(mount_point) >= len(longest):
            longest = mount_point
            kind = after.split()[0]
    return kind
