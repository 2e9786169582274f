"""Watch srun while the tasks run: end it if it still waits when all of them have ended.

srun learns from a slurmstepd on each node that its tasks have ended. If a slurmstepd was killed, srun waits until the
time limit of the job (measured with Slurm 22.05.8), and the nodes stay taken.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import Final

from hpcddp.errors import write_message
from hpcddp.jobfile.write import parse_resolved
from hpcddp.polling import wait_until
from hpcddp.run.directory import AttemptDirectory
from hpcddp.sandbox.processes import Process, find

STEP_PATIENCE_S: Final = 60.0
"""How long srun may wait after the last record of the tasks; they wait up to 30 s for their trackers."""
# The records may be on a file system that many jobs share.
_POLL_S: Final = 10.0
# How long srun gets to end the step before it is killed.
_SRUN_PATIENCE_S: Final = 15.0
_SRUN_POLL_S: Final = 0.5


def watch(attempt: AttemptDirectory, pid: int, *, patience_s: float = STEP_PATIENCE_S, poll_s: float = _POLL_S) -> None:
    """Return when srun has ended; end it if it waits too long for tasks that have ended.

    Args:
        attempt: the attempt that the tasks belong to.
        pid: the process id of srun.
        patience_s: how long it may wait after the last record of the tasks, in seconds.
        poll_s: seconds between two looks.
    """
    srun = find(pid)
    ended_at: float | None = None
    while srun is not None and find(pid) == srun:
        if not tasks_have_ended(attempt):
            ended_at = None
        elif ended_at is None:
            ended_at = time.monotonic()
        elif time.monotonic() - ended_at >= patience_s:
            write_message(
                f"all tasks ended {patience_s:.0f} s ago, and srun still waits; it is ended, for a slurmstepd was "
                "probably killed"
            )
            _end(srun)
            return
        time.sleep(poll_s)


def tasks_have_ended(attempt: AttemptDirectory) -> bool:
    """Return whether the records of an attempt show that all of its tasks have ended, or are about to.

    They do if rank 0 has written the result or the decision, which it does last, or if each rank has written how its
    program ended or why it failed.
    """
    if attempt.run.result.exists() or attempt.decision.exists():
        return True
    try:
        tasks = parse_resolved(attempt.run.job_file.read_text(encoding="utf-8")).tasks
    except OSError:
        return False
    ended = (attempt.rank_exit(rank).exists() or attempt.rank_error(rank).exists() for rank in range(tasks))
    return all(ended)


def _end(srun: Process) -> None:
    """Let srun end its step; kill it if it does not."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.kill(srun.pid, signum)
        if wait_until(lambda: find(srun.pid) != srun, timeout_s=_SRUN_PATIENCE_S, poll_s=_SRUN_POLL_S):
            return
