"""Requeue this job, and start it again soon."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from hpcddp.polling import wait_until
from hpcddp.slurm import commands
from hpcddp.slurm.job import ask_slurm, cause_of, may_help_later
from hpcddp.stop.reasons import Cause

PATIENCE_S = 60.0
"""How long a controller that is away is waited for."""

_TRIES = 3
_PAUSE_S = 2.0
# The controller raises the restart count before it answers; a busy one may be read a little late.
_LOOKS = 5
_BETWEEN_LOOKS_S = 0.3
# A grace time that is longer than this is not waited for.
_LONGEST_GRACE_S = 900.0
_BETWEEN_QUESTIONS_S = 3.0


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
        why: Slurm's own words where it was not done, else empty.
    """

    outcome: RequeueOutcome
    why: str = ""


def requeue(job_id: str, *, restarts: int, lift: bool, patience_s: float = PATIENCE_S) -> Requeued:
    """Requeue this job and make sure that it was done: Slurm answers the same whether it does it or not.

    Slurm signals the whole job when it is requeued, this process too: it ignores TERM before it calls this.

    Args:
        job_id: the job; ``123_4`` for an array element.
        restarts: the restart count of this attempt.
        lift: whether Slurm was told before not to requeue the job by itself, so that it must be allowed to first.
        patience_s: how long to ask again while the controller does not answer, in seconds.
    """
    deadline = time.monotonic() + patience_s
    tries = 0
    while tries < _TRIES:
        try:
            if lift:
                commands.update_job(job_id, Requeue="1")
            commands.requeue(job_id)
        except commands.SlurmCommandError as error:
            sys.stderr.write(f"hpcddp: {error.message}\n")
            if not may_help_later(error):
                missing = isinstance(error, commands.SlurmMissingError)
                return Requeued(
                    outcome=RequeueOutcome.UNREACHABLE if missing else RequeueOutcome.REFUSED, why=error.message
                )
            if time.monotonic() >= deadline:
                return Requeued(outcome=RequeueOutcome.UNREACHABLE, why=error.message)
            time.sleep(_PAUSE_S)
            continue
        tries += 1
        seen = _SEEN.get(_look(job_id, restarts, patience_s=deadline - time.monotonic()))
        if seen is not None:
            return Requeued(outcome=seen)
    return Requeued(
        outcome=RequeueOutcome.REFUSED, why=f"scontrol requeue was called {_TRIES} times, and nothing happened"
    )


def outlast_grace(job_id: str, *, restarts: int, before: Requeued) -> Requeued:
    """Stay until Slurm takes a preempted job away: one that ends within the grace time is never requeued (measured).

    Args:
        job_id: the job.
        restarts: the restart count of this attempt.
        before: how the requeue went before; a controller that was away is tried again.
    """
    deadline = time.monotonic() + _LONGEST_GRACE_S
    done = before
    while time.monotonic() < deadline:
        time.sleep(_BETWEEN_QUESTIONS_S)
        job = ask_slurm(job_id)
        cause = cause_of(job, restarts_at_start=restarts)
        if cause is Cause.PREEMPTION and done.outcome is RequeueOutcome.UNREACHABLE:
            done = requeue(job_id, restarts=restarts, lift=False, patience_s=0.0)
        elif (outcome := _SEEN.get(cause)) is not None:
            done = Requeued(outcome=outcome)
        elif job is not None and cause is not Cause.PREEMPTION:
            return done
        if done.outcome in {RequeueOutcome.REQUEUED, RequeueOutcome.CANCELLED}:
            return done
    return done


def outlast_silence(job_id: str) -> None:
    """Stay until Slurm answers, or takes the job away: its controller may be back soon.

    Args:
        job_id: the job.
    """
    wait_until(lambda: ask_slurm(job_id), timeout_s=_LONGEST_GRACE_S, poll_s=_BETWEEN_QUESTIONS_S)


def expedite(job_id: str) -> None:
    """Have a job that was just requeued start in seconds; without it Slurm waits until its old credentials are void.

    Call it last: what ends later than the start time that is set here gets Slurm's own start time, two minutes on. And
    not ``now``: a start in the very moment of the requeue failed one time in five (measured).

    Args:
        job_id: the job, which is still ending.
    """
    try:
        commands.update_job(job_id, StartTime="now+2seconds")
    except commands.SlurmCommandError as error:
        sys.stderr.write(f"hpcddp: {error.message}; the job starts when Slurm sees fit, usually in two minutes\n")


def _look(job_id: str, restarts: int, *, patience_s: float) -> Cause:
    """Return what became of the job, asked again for a moment while it seems to go on."""
    for _ in range(_LOOKS):
        cause = cause_of(ask_slurm(job_id, patience_s=patience_s), restarts_at_start=restarts)
        if cause in _SEEN:
            return cause
        time.sleep(_BETWEEN_LOOKS_S)
    return Cause.UNKNOWN
