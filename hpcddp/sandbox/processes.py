"""Find and end every process of a sandbox, and no other.

Processes that the sandbox starts have its token in their environment. Slurm's step daemons drop the token but have
``SLURM_CONF``. Tasks may drop both, but descend from a step daemon or from the daemon manager, which adopts orphans.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcddp.errors import HpcddpError

TOKEN_VARIABLE = "HPCDDP_SANDBOX"  # noqa: S105 - the name of a variable
_PROC = Path("/proc")
# Debian's is slurmstepd-wlm.
_STEP_DAEMON = "slurmstepd"
_POLL_S = 0.02
_TIMEOUT_S = 30.0
# Positions after the command's name in /proc/PID/stat (proc_pid_stat(5)).
_STATE, _PARENT, _START = 0, 1, 19
_ENDED = frozenset("ZX")


class StillRunningError(HpcddpError):
    """A process of the sandbox does not end, not even by SIGKILL."""

    kind = "still_running"


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process, told apart from a later one with the same id by its start time.

    Attributes:
        pid: its id in this process's view.
        parent: its parent's id.
        start: clock ticks from the machine's start to the process's.
    """

    pid: int
    parent: int
    start: int


def find(pid: int) -> Process | None:
    """Return the process with this id, or None if there is none or it is a zombie."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name is in parentheses and may contain spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    if fields[_STATE] in _ENDED:
        return None
    return Process(pid=pid, parent=int(fields[_PARENT]), start=int(fields[_START]))


def boot_id() -> str:
    """Return the id of this boot of the machine, from which start times count."""
    return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def members(token: str, slurm_conf: Path) -> frozenset[Process]:
    """Return every process of the sandbox except the caller."""
    everything = {process.pid: process for process in _everything()}
    found = {pid for pid in everything if _is_marked(pid, token, slurm_conf)}
    # Parents may be listed after their children: repeat until nothing is new.
    while new := {pid for pid, process in everything.items() if process.parent in found and pid not in found}:
        found |= new
    return frozenset(everything[pid] for pid in found - {os.getpid()})


def end(process: Process, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to exactly this process; do nothing if it has ended or its id was reused."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(process.pid)
        try:
            # The descriptor holds the process: if the start time fits now, the signal cannot reach another.
            now = find(process.pid)
            if now is not None and now.start == process.start:
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


def end_all(token: str, slurm_conf: Path, *, manager: int | None) -> None:
    """End every process of the sandbox and wait until all are gone.

    Args:
        token: the sandbox's token.
        slurm_conf: the sandbox's slurm.conf.
        manager: the daemon manager's id; it is ended last, because it adopts orphans.

    Raises:
        StillRunningError: a process is left after 30 s.
    """
    deadline = time.monotonic() + _TIMEOUT_S
    while found := members(token, slurm_conf):
        for process in {one for one in found if one.pid != manager} or found:
            end(process)
        if time.monotonic() > deadline:
            pids = ", ".join(str(one.pid) for one in sorted(found, key=lambda one: one.pid))
            raise StillRunningError(
                f"process {pids} of the sandbox is still there {_TIMEOUT_S:.0f} s after SIGKILL, "
                "it waits for a device or a file system; run hpcddp sandbox down again"
            )
        time.sleep(_POLL_S)


def _everything() -> Iterator[Process]:
    for entry in _PROC.iterdir():
        if entry.name.isdecimal() and (process := find(int(entry.name))) is not None:
            yield process


def _is_marked(pid: int, token: str, slurm_conf: Path) -> bool:
    environment = _environment(pid)
    if environment.get(TOKEN_VARIABLE) == token:
        return True
    return environment.get("SLURM_CONF") == str(slurm_conf) and _program(pid).startswith(_STEP_DAEMON)


def _environment(pid: int) -> Mapping[str, str]:
    """Return the environment that a process started with; empty where it is another user's."""
    try:
        text = (_PROC / str(pid) / "environ").read_bytes().decode("utf-8", "replace")
    except OSError:
        return {}
    pairs = (entry.partition("=") for entry in text.split("\0"))
    return {name.lstrip(): value for name, _, value in pairs if value}


def _program(pid: int) -> str:
    try:
        return (_PROC / str(pid) / "exe").readlink().name
    except OSError:
        return ""
