"""Ending the other tasks of a failed job on this machine, as ``srun --kill-on-bad-exit`` does on a cluster.

A program of its own, so that the task that failed can end at once: its peers then see that it has gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

from hpcddp.launch.lifeline import leave
from hpcddp.run.directory import AttemptDirectory

# What srun does: TERM, and KILL for what is still there (slurm.conf(5), KillWait). A task that sees that another one
# has gone ends by itself within a second or two.
_OWN_END_S: Final = 2.0
_KILL_WAIT_S: Final = 8.0
_POLL_S: Final = 0.1


def fail(exit_code: int, attempt: AttemptDirectory) -> NoReturn:
    """End this process because it failed; on this machine have the attempt's other tasks ended, as srun would.

    Args:
        exit_code: what it exits with.
        attempt: its attempt.
    """
    if "SUBMITIT_LOCAL_GLOBALID" in os.environ:
        words = [sys.executable, "-P", "-m", "hpcddp.launch.siblings", str(os.getppid()), str(attempt.path)]
        subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True)
    leave(exit_code)


def tasks_of(parent: int, attempt: AttemptDirectory, proc: Path = Path("/proc")) -> list[int]:
    """Return the running tasks of an attempt.

    Args:
        parent: the process id of whoever started them.
        attempt: the attempt.
        proc: where the kernel shows processes (proc(5)).
    """
    mark = f"HPCDDP_ATTEMPT_DIR={attempt.path}".encode()
    return sorted(
        int(entry.name) for entry in proc.iterdir() if entry.name.isdecimal() and _is_task(entry, parent, mark)
    )


def _is_task(entry: Path, parent: int, mark: bytes) -> bool:
    with contextlib.suppress(OSError):
        # The second field, the name in parentheses, may hold spaces and parentheses.
        state, its_parent = (entry / "stat").read_bytes().rpartition(b")")[2].split()[:2]
        # A process id comes again: the environment tells whose child it is.
        same = int(its_parent) == parent and state not in {b"Z", b"X"}
        return same and mark in (entry / "environ").read_bytes().split(b"\0")
    return False


def end_tasks(
    tasks: Callable[[], list[int]], *, own_end_s: float = _OWN_END_S, kill_wait_s: float = _KILL_WAIT_S
) -> None:
    """Wait for tasks to end; end those that do not.

    Args:
        tasks: returns the process ids of those that still run.
        own_end_s: how long they may take by themselves, in seconds.
        kill_wait_s: how long from TERM to KILL, in seconds.
    """
    if _gone(tasks, own_end_s):
        return
    # A stopped process hears TERM when it goes on.
    _send(tasks(), signal.SIGCONT, signal.SIGTERM)
    if not _gone(tasks, kill_wait_s):
        _send(tasks(), signal.SIGKILL)


def _gone(tasks: Callable[[], list[int]], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while tasks():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _send(pids: list[int], *signals: signal.Signals) -> None:
    for pid in pids:
        for signum in signals:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)


if __name__ == "__main__":
    starter, directory = int(sys.argv[1]), AttemptDirectory.from_text(sys.argv[2])
    end_tasks(lambda: tasks_of(starter, directory))
