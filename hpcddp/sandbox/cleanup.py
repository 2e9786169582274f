"""Find and end every process of a sandbox, and no other.

Processes that the sandbox starts have its token in their environment. Slurm's step daemons drop the token but have
``SLURM_CONF``; since 24.11 they write their title over all of it, but have files of the sandbox open. Tasks may drop
both, but descend from a step daemon or from the daemon manager, which adopts orphans.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from hpcddp.errors import HpcddpError
from hpcddp.processes import Process, all_processes, environment_of, find, program_of

TOKEN_VARIABLE = "HPCDDP_SANDBOX"  # noqa: S105 - the name of a variable
# Debian's is slurmstepd-wlm.
_STEP_DAEMON = "slurmstepd"
_POLL_S = 0.02
_TIMEOUT_S = 30.0


class StillRunningError(HpcddpError):
    """A process of the sandbox does not end, not even by SIGKILL."""

    kind = "still_running"


def members(token: str, slurm_conf: Path) -> frozenset[Process]:
    """Return every process of the sandbox except the caller."""
    everything = {process.pid: process for process in all_processes()}
    pids = {pid for pid in everything if _is_marked(pid, token, slurm_conf)}
    # Parents may be listed after their children: repeat until nothing is new.
    while True:
        children = {pid for pid, process in everything.items() if process.parent in pids}
        if children <= pids:
            break
        pids |= children
    return frozenset(everything[pid] for pid in pids - {os.getpid()})


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
        manager: the daemon manager's id; it is ended last, because it adopts orphans.

    Raises:
        StillRunningError: a process is left after 30 s.
    """
    deadline = time.monotonic() + _TIMEOUT_S
    while processes := members(token, slurm_conf):
        others = {process for process in processes if process.pid != manager}
        for process in others or processes:
            end(process)
        if time.monotonic() > deadline:
            pids = ", ".join(str(pid) for pid in sorted(process.pid for process in processes))
            raise StillRunningError(
                f"process {pids} of the sandbox is still there {_TIMEOUT_S:.0f} s after SIGKILL, "
                "it waits for a device or a file system; run hpcddp sandbox down again"
            )
        time.sleep(_POLL_S)


def _is_marked(pid: int, token: str, slurm_conf: Path) -> bool:
    # Slurm pads the title of a step daemon, which may stand over variables, with spaces (src/common/setproctitle.c).
    environment = {name.lstrip(): value for name, value in environment_of(pid).items()}
    if environment.get(TOKEN_VARIABLE) == token:
        return True
    if not program_of(pid).startswith(_STEP_DAEMON):
        return False
    return environment.get("SLURM_CONF") == str(slurm_conf) or _has_open(pid, slurm_conf.parent)


def _has_open(pid: int, directory: Path) -> bool:
    """Return whether a process has a file below a directory open."""
    with contextlib.suppress(OSError):
        return any(entry.readlink().is_relative_to(directory) for entry in Path(f"/proc/{pid}/fd").iterdir())
    return False
