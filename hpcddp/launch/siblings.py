"""Ending the other tasks of a failed job on this machine, as ``srun --kill-on-bad-exit`` does on a cluster."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

from hpcddp.launch.lifeline import leave
from hpcddp.run.directory import AttemptDirectory

# What srun does: TERM, and KILL for what is still there (slurm.conf(5), KillWait). A task that is told that another one
# has failed ends by itself within a second or two.
_OWN_END_S: Final = 2.0
_KILL_WAIT_S: Final = 8.0
_POLL_S: Final = 0.1


def siblings_of(pid: int, attempt: AttemptDirectory, proc: Path = Path("/proc")) -> list[int]:
    """Return the other running tasks of an attempt that have the same parent.

    Args:
        pid: a task's process id.
        attempt: its attempt.
        proc: where the kernel shows processes (proc(5)).
    """
    parent = _parent_and_state(proc / str(pid))[0]
    mark = f"HPCDDP_ATTEMPT_DIR={attempt.path}".encode()
    others = [entry for entry in proc.iterdir() if entry.name.isdecimal() and entry.name != str(pid)]
    return sorted(int(entry.name) for entry in others if _is_task(entry, parent, mark))


def _is_task(entry: Path, parent: int, mark: bytes) -> bool:
    with contextlib.suppress(OSError):
        its_parent, state = _parent_and_state(entry)
        # A task whose starter has died is a child of init, as many others are: the environment tells them apart.
        same = its_parent == parent and state not in {"Z", "X"}
        return same and mark in (entry / "environ").read_bytes().split(b"\0")
    return False


def _parent_and_state(entry: Path) -> tuple[int, str]:
    # The second field, the name in parentheses, may hold spaces and parentheses.
    state, parent = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:2]
    return int(parent), state


def fail(exit_code: int, attempt: AttemptDirectory) -> NoReturn:
    """End this process because it failed; on this machine end the attempt's other tasks first, as srun would.

    Args:
        exit_code: what it exits with.
        attempt: its attempt.
    """
    if "SUBMITIT_LOCAL_GLOBALID" in os.environ:
        end_siblings(attempt)
    leave(exit_code)


def end_siblings(
    attempt: AttemptDirectory,
    pid: int | None = None,
    *,
    own_end_s: float = _OWN_END_S,
    kill_wait_s: float = _KILL_WAIT_S,
) -> None:
    """Wait for the other tasks of an attempt to end; end those that do not.

    Args:
        attempt: the attempt.
        pid: the task that failed; None = this process.
        own_end_s: how long they may take by themselves, in seconds.
        kill_wait_s: how long from TERM to KILL, in seconds.
    """
    task = os.getpid() if pid is None else pid

    def others() -> list[int]:
        return siblings_of(task, attempt)

    if _gone(others, own_end_s):
        return
    # A stopped process hears TERM when it goes on.
    _send(others(), signal.SIGCONT, signal.SIGTERM)
    if not _gone(others, kill_wait_s):
        _send(others(), signal.SIGKILL)


def _gone(others: Callable[[], list[int]], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while others():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _send(pids: list[int], *signals: signal.Signals) -> None:
    for pid in pids:
        for signum in signals:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
