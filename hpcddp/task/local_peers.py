"""End the other tasks of a failed local run, as ``srun --kill-on-bad-exit`` does on a cluster.

The task that failed starts this module as a separate program and exits at once, so that its peers see it exit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Final, NoReturn

from hpcddp.processes import all_processes, environment_of, wait_until
from hpcddp.run.directory import AttemptDirectory
from hpcddp.task.process_state import PROCESS_STATE, exit_process

# srun sends TERM, and KILL to tasks that still run later (slurm.conf(5), KillWait). A task that loses a peer exits by
# itself within a second or two.
_OWN_EXIT_S: Final = 2.0
_KILL_WAIT_S: Final = 8.0
_POLL_S: Final = 0.1


def exit_after_failure(exit_code: int, attempt: AttemptDirectory) -> NoReturn:
    """End this process because it failed; in a local run, also have the other tasks of the attempt ended."""
    if not PROCESS_STATE.has_srun:
        words = [sys.executable, "-P", "-m", "hpcddp.task.local_peers", str(os.getppid()), str(attempt.path)]
        subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True)
    exit_process(exit_code)


def tasks_of(parent: int, attempt: AttemptDirectory) -> list[int]:
    """Return the running tasks of an attempt.

    Args:
        parent: the process id of their parent.
    """
    children = (process.pid for process in all_processes() if process.parent == parent)
    # Process ids are reused, so the environment is compared as well.
    return sorted(pid for pid in children if environment_of(pid).get("HPCDDP_ATTEMPT_DIR") == str(attempt.path))


def end_tasks(
    tasks: Callable[[], list[int]], *, own_exit_s: float = _OWN_EXIT_S, kill_wait_s: float = _KILL_WAIT_S
) -> None:
    """Wait for tasks to exit; end those that do not.

    Args:
        tasks: returns the process ids of those that still run.
        own_exit_s: how long to wait before TERM, in seconds.
        kill_wait_s: how long to wait between TERM and KILL, in seconds.
    """
    if wait_until(lambda: not tasks(), timeout_s=own_exit_s, poll_s=_POLL_S):
        return
    # A stopped process handles TERM only after CONT.
    _send(tasks(), signal.SIGCONT, signal.SIGTERM)
    if not wait_until(lambda: not tasks(), timeout_s=kill_wait_s, poll_s=_POLL_S):
        _send(tasks(), signal.SIGKILL)


def _send(pids: list[int], *signals: signal.Signals) -> None:
    for pid in pids:
        for signum in signals:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)


if __name__ == "__main__":
    parent = int(sys.argv[1])
    directory = AttemptDirectory.from_text(sys.argv[2])
    end_tasks(lambda: tasks_of(parent, directory))
