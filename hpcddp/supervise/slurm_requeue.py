"""Requeue this job, and set an earlier start time."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from hpcddp.polling import wait_until
from hpcddp.slurm import commands
from hpcddp.slurm.job import ask_slurm, cause_of, is_transient
from hpcddp.stop.reasons import Cause

PATIENCE_S = 60.0
"""How long to wait for a controller that does not respond."""

_TRIES = 3
_PAUSE_S = 2.0
# The controller raises the restart count before it answers; a busy one may show it a little late.
_MAX_POLLS = 5
_POLL_S = 0.3
# The longest wait for the end of a grace time, or for the controller.
_LONGEST_GRACE_S = 900.0
_LONG_POLL_S = 3.0


class RequeueOutcome(Enum):
    """The result of a request to requeue the job."""

    REQUEUED = "requeued"
    CANCELLED = "cancelled"
    """The user has cancelled the job meanwhile."""
    REFUSED = "refused"
    UNREACHABLE = "unreachable"


_SEEN = MappingProxyType({Cause.REQUEUED: RequeueOutcome.REQUEUED, Cause.CANCELLED: RequeueOutcome.CANCELLED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Requeued:
    """The result of a requeue.

    Args:
        outcome: the result.
        why: Slurm's message where it was not done, else empty.
    """

    outcome: RequeueOutcome
    why: str = ""


def requeue(job_id: str, *, restarts: int, set_requeue_flag: bool, patience_s: float = PATIENCE_S) -> Requeued:
    """Requeue this job and check the restart count: scontrol exits with 0 even if Slurm does nothing.

    Slurm signals the whole job when it is requeued, this process too: it ignores TERM before it calls this.

    Args:
        job_id: the job; ``123_4`` for an array element.
        restarts: the restart count of this attempt.
        set_requeue_flag: whether to set Requeue=1 first (a --no-requeue job).
        patience_s: how long to ask again while the controller does not answer, in seconds.
    """
    deadline = time.monotonic() + patience_s
    tries = 0
    while tries < _TRIES:
        try:
            if set_requeue_flag:
                commands.update_job(job_id, Requeue="1")
            commands.requeue(job_id)
        except commands.SlurmCommandError as error:
            sys.stderr.write(f"hpcddp: {error.message}\n")
            if not is_transient(error):
                missing = isinstance(error, commands.SlurmMissingError)
                return Requeued(
                    outcome=RequeueOutcome.UNREACHABLE if missing else RequeueOutcome.REFUSED, why=error.message
                )
            if time.monotonic() >= deadline:
                return Requeued(outcome=RequeueOutcome.UNREACHABLE, why=error.message)
            time.sleep(_PAUSE_S)
            continue
        tries += 1
        seen = _SEEN.get(_poll_job(job_id, restarts, patience_s=deadline - time.monotonic()))
        if seen is not None:
            return Requeued(outcome=seen)
    return Requeued(
        outcome=RequeueOutcome.REFUSED, why=f"scontrol requeue was called {_TRIES} times, and nothing happened"
    )


def wait_for_preemption(job_id: str, *, restarts: int, before: Requeued) -> Requeued:
    """Wait until Slurm requeues a preempted job: one that ends within the grace time is never requeued (measured).

    Args:
        job_id: the job.
        restarts: the restart count of this attempt.
        before: the result of the first request; it is repeated if the controller did not respond.
    """
    deadline = time.monotonic() + _LONGEST_GRACE_S
    done = before
    while time.monotonic() < deadline:
        time.sleep(_LONG_POLL_S)
        job = ask_slurm(job_id)
        cause = cause_of(job, restarts_at_start=restarts)
        if cause is Cause.PREEMPTION and done.outcome is RequeueOutcome.UNREACHABLE:
            done = requeue(job_id, restarts=restarts, set_requeue_flag=False, patience_s=0.0)
        elif (outcome := _SEEN.get(cause)) is not None:
            done = Requeued(outcome=outcome)
        elif job is not None and cause is not Cause.PREEMPTION:
            return done
        if done.outcome in {RequeueOutcome.REQUEUED, RequeueOutcome.CANCELLED}:
            return done
    return done


def wait_for_controller(job_id: str) -> None:
    """Wait until the controller responds again; if the job is preempted meanwhile, Slurm ends this process.

    Args:
        job_id: the job.
    """
    wait_until(lambda: ask_slurm(job_id), timeout_s=_LONGEST_GRACE_S, poll_s=_LONG_POLL_S)


def expedite(job_id: str) -> None:
    """Set an earlier start time for a job that was just requeued; Slurm waits until its old credentials have expired.

    Call it last: what ends later than the start time that is set here gets Slurm's own start time, two minutes on. And
    not ``now``: a start in the very moment of the requeue failed one time in five (measured).

    Args:
        job_id: the job, which is still ending.
    """
    try:
        commands.update_job(job_id, StartTime="now+2seconds")
    except commands.SlurmCommandError as error:
        sys.stderr.write(
            f"hpcddp: {error.message}; the job starts after Slurm's default requeue delay, usually in two minutes\n"
        )


def _poll_job(job_id: str, restarts: int, *, patience_s: float) -> Cause:
    """Poll the job until it is requeued or cancelled; return the cause."""
    for _ in range(_MAX_POLLS):
        cause = cause_of(ask_slurm(job_id, patience_s=patience_s), restarts_at_start=restarts)
        if cause in _SEEN:
            return cause
        time.sleep(_POLL_S)
    return Cause.UNKNOWN
