"""Control groups of a sandbox, so that Slurm's names for them (``slurm_n1``) do not collide with others.

Slurm gets a mount point that only the sandbox sees. The groups under it have the sandbox's token in their names, so
that they are found and removed at the end, including those that killed step daemons left behind.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from hpcddp.sandbox.programs import Command

_ROOT = Path("/sys/fs/cgroup")
# Controllers that Slurm's plugins for control groups of version 1 use (cgroup.conf(5)).
_CONTROLLERS = ("freezer", "cpuset", "memory", "devices", "cpuacct")
# A group is busy for a moment after its last process has ended.
_TIMEOUT_S = 10.0
_POLL_S = 0.05


def is_version_1() -> bool:
    """Return whether this machine has control groups of version 1, which mount each controller separately."""
    return (_ROOT / "freezer" / "tasks").exists()


def configuration(directory: Path) -> str:
    """Return the text of cgroup.conf (cgroup.conf(5))."""
    return f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={_mount_point(directory)}\nCgroupAutomount=no\n"


def make(directory: Path, token: str) -> tuple[Command, ...]:
    """Make the sandbox's groups, and return the commands with which the daemon manager mounts them."""
    commands = []
    for controller in _present(_CONTROLLERS):
        group = _ROOT / controller / _name(token)
        group.mkdir()
        if controller == "cpuset":
            # A new group has no processors, and then accepts no process.
            for setting in ("cpuset.cpus", "cpuset.mems"):
                (group / setting).write_text((group.parent / setting).read_text())
        mount_point = _mount_point(directory) / controller
        mount_point.mkdir(parents=True)
        commands.append(Command(argv=("mount", "--bind", str(group), str(mount_point))))
    return tuple(commands)


def remove(token: str) -> None:
    """Remove the sandbox's groups, after every process in them has ended."""
    deadline = time.monotonic() + _TIMEOUT_S
    for controller in _present(_CONTROLLERS):
        for group, _, _ in os.walk(_ROOT / controller / _name(token), topdown=False):
            while not _is_removed(Path(group), last_try=time.monotonic() > deadline):
                time.sleep(_POLL_S)


def _is_removed(group: Path, *, last_try: bool) -> bool:
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        if last_try:
            raise
        return False
    return True


def _present(controllers: Sequence[str]) -> list[str]:
    return [controller for controller in controllers if (_ROOT / controller / "tasks").exists()]


def _mount_point(directory: Path) -> Path:
    return directory / "cgroup"


def _name(token: str) -> str:
    return f"hpcddp-{token[:8]}"
