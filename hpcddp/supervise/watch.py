"""Watch srun while the tasks run: end it if it still waits when all of them have ended, and warn them of their end.

srun learns from a slurmstepd on each node that its tasks have ended. If a slurmstepd was killed, srun waits until the
time limit of the job (measured with Slurm 22.05.8), and the nodes stay taken.

In an allocation that salloc has made, no Slurm sends the signal that comes some time before the end.
"""

from __future__ import annotations

import math
import os
import signal
import time
from contextlib import suppress
from typing import Final

from hpcddp.errors import write_message
from hpcddp.jobfile.job import JobSpec
from hpcddp.polling import wait_until
from hpcddp.processes import Process, find
from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.job_file import read_job_file
from hpcddp.run.job_records import read_start
from hpcddp.run.record import RecordError
from hpcddp.run.result import read_result

STEP_PATIENCE_S: Final = 60.0
"""How long srun may wait after the last record of the tasks; they wait up to 30 s for their trackers."""
# The records may be on a file system that many jobs share.
_POLL_S: Final = 10.0
# How long srun gets to end the step before it is killed.
_SRUN_PATIENCE_S: Final = 15.0
_SRUN_POLL_S: Final = 0.5


def watch(
    attempt: AttemptDirectory,
    pid: int,
    *,
    warn: bool = False,
    patience_s: float = STEP_PATIENCE_S,
    poll_s: float = _POLL_S,
) -> None:
    """Return when srun has ended; end it if it waits too long for tasks that have ended.

    Args:
        attempt: the attempt that the tasks belong to.
        pid: the process id of srun.
        warn: whether to send srun USR2, which it passes on to the tasks, ``requeue.signal_lead`` before the end.
        patience_s: how long it may wait after the last record of the tasks, in seconds.
        poll_s: seconds between two looks.
    """
    srun = find(pid)
    ended_at: float | None = None
    spec = _job_of(attempt)
    warn_at = _warn_at(attempt, spec) if warn and spec is not None else math.inf
    while srun is not None and find(pid) == srun:
        if time.time() >= warn_at:
            warn_at = math.inf
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR2)
        if not tasks_have_ended(attempt, tasks=None if spec is None else spec.tasks):
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
        # On the host of an interactive shell no other process ends this one.
        pause_s = min(poll_s, max(0.0, warn_at - time.time()))
        wait_until(lambda: find(pid) != srun, timeout_s=pause_s, poll_s=min(_SRUN_POLL_S, poll_s))


def _job_of(attempt: AttemptDirectory) -> JobSpec | None:
    """Return the job of an attempt; None, with a message, if it cannot be read: srun is watched all the same."""
    try:
        return read_job_file(attempt.run)
    except RecordError as error:
        write_message(error.message)
        return None


def _warn_at(attempt: AttemptDirectory, spec: JobSpec) -> float:
    """Return when the tasks are warned of their end, in seconds since the epoch; infinity if they are not."""
    try:
        start, lead = read_start(attempt), spec.signal_lead
    except RecordError as error:
        write_message(error.message)
        return math.inf
    return (
        math.inf if start is None or start.end_time is None or lead is None else start.end_time - lead.total_seconds()
    )


def tasks_have_ended(attempt: AttemptDirectory, *, tasks: int | None) -> bool:
    """Return whether the records of an attempt show that all of its tasks have ended, or are about to.

    They do if rank 0 has written the result or the decision, which it does last, or if each rank has written how its
    program ended or why it failed.

    Args:
        attempt: the attempt.
        tasks: how many tasks it has; None if that is not known.
    """
    if _is_concluded(attempt) or attempt.decision.exists():
        return True
    return tasks is not None and all(
        attempt.rank_exit(rank).exists() or attempt.rank_error(rank).exists() for rank in range(tasks)
    )


def _is_concluded(attempt: AttemptDirectory) -> bool:
    """Return whether this attempt, not an earlier one that ended late, has written the result of the run."""
    try:
        result = read_result(attempt.run)
    except RecordError:
        return False
    return result is not None and result.attempts == attempt.number + 1


def _end(srun: Process) -> None:
    """Let srun end its step; kill it if it does not."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.kill(srun.pid, signum)
        if wait_until(lambda: find(srun.pid) != srun, timeout_s=_SRUN_PATIENCE_S, poll_s=_SRUN_POLL_S):
            return
