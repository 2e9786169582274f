"""Requeue this job, and set an earlier start time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from types import MappingProxyType

from hpcddp.errors import write_message
from hpcddp.polling import wait_until
from hpcddp.run.directory import AttemptDirectory, RunDirectory
from hpcddp.run.events import Event, read_events
from hpcddp.run.failure import cancelled_in_log
from hpcddp.run.record import RecordError
from hpcddp.slurm import commands
from hpcddp.slurm.job import ask_slurm, cause_of, is_transient
from hpcddp.stop.reasons import Cause

PATIENCE_S = 60.0
"""How long to wait for a controller that does not respond."""

# Seconds from the end of an attempt to the start of the next one; the second, where a job of this run was still ending
# after the first. Slurm's own delay is then cred_expire + 1 s, by default 121 s, until its scheduler looks again.
_START_DELAY_S, _SLOW_END_DELAY_S = 2, 15
_SLURMS_DELAY_S = (118.0, 180.0)
# Where the run directory is away: Slurm opens the job's log in it, and fails a job where it cannot.
_DIRECTORY_AWAY_DELAY_S = 120

_TRIES = 3
_PAUSE_S = 2.0
# The controller raises the restart count before it answers; a busy one may show it a little late.
_MAX_POLLS = 5
_POLL_S = 0.3
# The longest wait for the end of a grace time, or for the controller.
_LONGEST_GRACE_S = 900.0
_LONG_POLL_S = 3.0
# slurmctld writes a change to its disk within 6 s (SAVE_MAX_WAIT is 5 in its source) and the time that the write takes.
_SAVE_S = 7


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


def requeue(
    job_id: str,
    *,
    attempt: AttemptDirectory,
    restarts: int,
    set_requeue_flag: bool,
    patience_s: float = PATIENCE_S,
) -> Requeued:
    """Requeue this job and check the restart count: scontrol exits with 0 even if Slurm does nothing.

    Slurm signals the whole job when it is requeued, this process too: it ignores TERM before it calls this.

    Args:
        job_id: the job; ``123_4`` for an array element.
        attempt: the attempt that ends; its batch log has slurmstepd's notices.
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
            write_message(error.message)
            if not is_transient(error):
                # An earlier request may have been carried out although its answer came too late.
                seen = _SEEN.get(_cause(ask_slurm(job_id), attempt, restarts))
                if seen is not None:
                    return Requeued(outcome=seen)
                missing = isinstance(error, commands.SlurmMissingError)
                return Requeued(
                    outcome=RequeueOutcome.UNREACHABLE if missing else RequeueOutcome.REFUSED, why=error.message
                )
            if time.monotonic() >= deadline:
                return Requeued(outcome=RequeueOutcome.UNREACHABLE, why=error.message)
            time.sleep(_PAUSE_S)
            continue
        tries += 1
        seen = _SEEN.get(_poll_job(job_id, attempt, restarts, patience_s=deadline - time.monotonic()))
        if seen is not None:
            return Requeued(outcome=seen)
    return Requeued(
        outcome=RequeueOutcome.REFUSED, why=f"scontrol requeue was called {_TRIES} times, and nothing happened"
    )


def stay_until_saved(
    job_id: str, *, attempt: AttemptDirectory, restarts: int, set_requeue_flag: bool, set_start_time: bool
) -> Requeued:
    """Stay until the controller has saved a requeue, and requeue the job again if it has lost it.

    A controller that is killed comes back with the state that it saved last: the job runs, as if it had not been
    requeued, and fails when this process ends. Slurm kills this process when KillWait is over.

    Args:
        job_id: the job, which has been requeued and is still ending.
        attempt: the attempt that ends.
        restarts: the restart count of this attempt.
        set_requeue_flag: whether to set Requeue=1 first (a --no-requeue job).
        set_start_time: whether to set an earlier start time, which applies if Slurm kills this process meanwhile.
    """
    done = Requeued(outcome=RequeueOutcome.REQUEUED)
    for _ in range(_TRIES):
        saved = time.monotonic() + _SAVE_S
        if set_start_time:
            expedite(job_id, delay_s=_SAVE_S + _START_DELAY_S)
        time.sleep(max(0.0, saved - time.monotonic()))
        job = ask_slurm(job_id, patience_s=PATIENCE_S)
        if job is None:
            break
        seen = _SEEN.get(_cause(job, attempt, restarts))
        if seen is not None:
            return Requeued(outcome=seen)
        write_message(f"slurmctld has lost the requeue of job {job_id}; the job is requeued again")
        done = requeue(job_id, attempt=attempt, restarts=restarts, set_requeue_flag=set_requeue_flag)
        if done.outcome is not RequeueOutcome.REQUEUED:
            break
    return done


def wait_for_preemption(job_id: str, *, attempt: AttemptDirectory, restarts: int, before: Requeued) -> Requeued:
    """Wait until Slurm requeues a preempted job: one that ends within the grace time is never requeued (measured).

    Args:
        job_id: the job.
        attempt: the attempt that ends.
        restarts: the restart count of this attempt.
        before: the result of the first request; it is repeated if the controller did not respond.
    """
    deadline = time.monotonic() + _LONGEST_GRACE_S
    done = before
    while time.monotonic() < deadline:
        time.sleep(_LONG_POLL_S)
        job = ask_slurm(job_id)
        cause = _cause(job, attempt, restarts)
        if cause is Cause.PREEMPTION and done.outcome is RequeueOutcome.UNREACHABLE:
            done = requeue(job_id, attempt=attempt, restarts=restarts, set_requeue_flag=False, patience_s=0.0)
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


def start_delay_s(run: RunDirectory) -> int:
    """Return the seconds to set between the end of an attempt and the start of the next one.

    A job that still ends at the start time that was set, because of a slow epilog for example, gets Slurm's own delay.
    A run that has waited for that long before gets more time to end.
    """
    if not run.path.is_dir():
        return _DIRECTORY_AWAY_DELAY_S
    events: list[Event] = []
    with suppress(RecordError):
        events = [event for event in read_events(run.events) if event.kind in {"requeue", "resume", "start"}]
    # Nothing was set for a requeue that is found only at the next start.
    delays_s = (
        after.time - before.time
        for before, after in pairwise(events)
        if (before.kind, after.kind) == ("requeue", "start") and not before.facts.get("found_at_start")
    )
    was_too_early = any(_SLURMS_DELAY_S[0] <= delay_s <= _SLURMS_DELAY_S[1] for delay_s in delays_s)
    return _SLOW_END_DELAY_S if was_too_early else _START_DELAY_S


def expedite(job_id: str, *, delay_s: int = _START_DELAY_S) -> None:
    """Set an earlier start time for a job that was just requeued; Slurm waits until its old credentials have expired.

    Call it last: what ends later than the start time that is set here gets Slurm's own start time, two minutes on. And
    not ``now``: a start in the very moment of the requeue failed one time in five (measured).

    Args:
        job_id: the job, which is still ending.
        delay_s: seconds from now to the start, at least 2.
    """
    try:
        commands.update_job(job_id, StartTime=f"now+{delay_s}seconds")
    except commands.SlurmCommandError as error:
        write_message(f"{error.message}; the job starts after Slurm's default requeue delay, usually in two minutes")


def _cause(job: Mapping[str, str] | None, attempt: AttemptDirectory, restarts: int) -> Cause:
    """Return why an attempt of the job ends, by its record and slurmstepd's notices."""
    return cause_of(job, restarts_at_start=restarts, cancelled=cancelled_in_log(attempt))


def _poll_job(job_id: str, attempt: AttemptDirectory, restarts: int, *, patience_s: float) -> Cause:
    """Poll the job until it is requeued or cancelled; return the cause."""
    for _ in range(_MAX_POLLS):
        cause = _cause(ask_slurm(job_id, patience_s=patience_s), attempt, restarts)
        if cause in _SEEN:
            return cause
        time.sleep(_POLL_S)
    return Cause.UNKNOWN
