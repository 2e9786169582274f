"""Requeue this job, set an earlier start time, and leave."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from types import MappingProxyType

from hpcddp.errors import write_message
from hpcddp.processes import wait_until
from hpcddp.run.directory import AttemptDirectory, RunDirectory
from hpcddp.run.events import Event, read_events
from hpcddp.run.failure import cancelled_in_log
from hpcddp.run.record import RecordError
from hpcddp.slurm import commands
from hpcddp.slurm.controller import Controller, ask_controller
from hpcddp.slurm.job import ask_slurm, cause_of, is_transient
from hpcddp.stop.reasons import Cause

PATIENCE_S = 60.0
"""How long to wait for a controller that does not respond."""

# Seconds from the end of an attempt to the start of the next one; the second, where a job of this run was still ending
# after the first. Slurm's own delay applies then, until its scheduler looks again.
_START_DELAY_S = 2
_SLOW_END_DELAY_S = 15
_SCHEDULER_INTERVAL_S = 60.0
# Where the run directory is away: Slurm opens the job's log in it, and fails a job where it cannot.
DIRECTORY_AWAY_DELAY_S = 120

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
_LOST = "slurmctld has lost the requeue of job {job_id}; the job is requeued again"
_STAYS = "slurmctld does not answer; this script stays until it does, because a job whose script ends now may be lost"


class RequeueOutcome(Enum):
    """The result of a request to requeue the job."""

    REQUEUED = "requeued"
    CANCELLED = "cancelled"
    """The user has cancelled the job meanwhile."""
    REFUSED = "refused"
    UNREACHABLE = "unreachable"
    """slurmctld does not answer."""
    NO_SCONTROL = "no_scontrol"
    """scontrol is not installed on this host."""


# The causes in the record of a job that show the outcome of a request to requeue it.
_OUTCOME_OF_CAUSE = MappingProxyType(
    {Cause.REQUEUED: RequeueOutcome.REQUEUED, Cause.CANCELLED: RequeueOutcome.CANCELLED}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequeueResult:
    """The result of a requeue.

    Args:
        why: Slurm's message where it was not done, else empty.
        start: when Slurm starts the job again, in words; empty before ``leave``.
    """

    outcome: RequeueOutcome
    why: str = ""
    start: str = ""


def requeue(
    job_id: str,
    *,
    attempt: AttemptDirectory,
    restarts: int,
    set_requeue_flag: bool,
    patience_s: float = PATIENCE_S,
) -> RequeueResult:
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
    for _ in range(_TRIES):
        error = _request_until_answered(job_id, deadline, set_requeue_flag=set_requeue_flag)
        if error is not None and is_transient(error):
            return RequeueResult(outcome=RequeueOutcome.UNREACHABLE, why=error.message)
        if error is not None:
            # An earlier request may have been carried out although its answer came too late.
            cause = _cause(ask_slurm(job_id), attempt, restarts)
            if cause in _OUTCOME_OF_CAUSE:
                return RequeueResult(outcome=_OUTCOME_OF_CAUSE[cause])
            if isinstance(error, commands.SlurmMissingError):
                return RequeueResult(outcome=RequeueOutcome.NO_SCONTROL, why=error.message)
            return RequeueResult(outcome=RequeueOutcome.REFUSED, why=error.message)
        cause = _poll_job(job_id, attempt, restarts, patience_s=deadline - time.monotonic())
        if cause in _OUTCOME_OF_CAUSE:
            return RequeueResult(outcome=_OUTCOME_OF_CAUSE[cause])
    return RequeueResult(
        outcome=RequeueOutcome.REFUSED, why=f"scontrol requeue was called {_TRIES} times, and nothing happened"
    )


def _request_until_answered(
    job_id: str, deadline: float, *, set_requeue_flag: bool
) -> commands.SlurmCommandError | None:
    """Call scontrol requeue, again while the controller does not answer; return the last error, None without one.

    Args:
        deadline: until when it is called again, on the monotonic clock.
        set_requeue_flag: whether to set Requeue=1 first (a --no-requeue job).
    """
    while True:
        try:
            if set_requeue_flag:
                commands.update_job(job_id, Requeue="1")
            commands.requeue(job_id)
        except commands.SlurmCommandError as error:
            write_message(error.message)
            if not is_transient(error) or time.monotonic() >= deadline:
                return error
        else:
            return None
        time.sleep(_PAUSE_S)


def stay_until_saved(job_id: str, *, attempt: AttemptDirectory, restarts: int) -> RequeueResult:
    """Stay until the controller has saved the requeue of a --no-requeue job; requeue it again if that is lost.

    A controller that is killed comes back with the state that it saved last: the job runs, as if it had not been
    requeued. Slurm then requeues a job with Requeue=1 by itself when the node reports that the job is not there, and
    fails one with Requeue=0. Slurm kills this process when KillWait is over.

    Args:
        job_id: the job, which has been requeued and is still ending.
        attempt: the attempt that ends.
        restarts: the restart count of this attempt.
    """
    result = RequeueResult(outcome=RequeueOutcome.REQUEUED)
    for _ in range(_TRIES):
        saved_at = time.monotonic() + _SAVE_S
        # It applies if Slurm kills this process meanwhile.
        set_start(job_id, _SAVE_S + _START_DELAY_S)
        time.sleep(max(0.0, saved_at - time.monotonic()))
        job = ask_slurm(job_id, patience_s=PATIENCE_S)
        if job is None:
            return result
        cause = _cause(job, attempt, restarts)
        if cause in _OUTCOME_OF_CAUSE:
            return RequeueResult(outcome=_OUTCOME_OF_CAUSE[cause])
        write_message(_LOST.format(job_id=job_id))
        result = requeue(job_id, attempt=attempt, restarts=restarts, set_requeue_flag=True)
        if result.outcome is not RequeueOutcome.REQUEUED:
            return result
    return result


def wait_and_requeue(
    job_id: str, *, attempt: AttemptDirectory, restarts: int, set_requeue_flag: bool, before: RequeueResult
) -> RequeueResult:
    """Stay after a request without effect, until Slurm requeues a preempted job itself or slurmctld answers again.

    A job whose script ends within the grace time of a preemption, or while slurmctld is away, may never be requeued
    (measured).

    Args:
        attempt: the attempt that ends.
        restarts: the restart count of this attempt.
        set_requeue_flag: whether to set Requeue=1 first (a --no-requeue job).
        before: the result of the first request; it is repeated if the controller did not respond.
    """
    deadline = time.monotonic() + _LONGEST_GRACE_S
    result = before
    if result.outcome is RequeueOutcome.UNREACHABLE:
        write_message(f"{_STAYS}, for up to {_LONGEST_GRACE_S / 60:g} minutes")
    while time.monotonic() < deadline:
        time.sleep(_LONG_POLL_S)
        job = ask_slurm(job_id)
        cause = _cause(job, attempt, restarts)
        if cause in _OUTCOME_OF_CAUSE:
            return RequeueResult(outcome=_OUTCOME_OF_CAUSE[cause])
        if job is None:
            continue
        if result.outcome is RequeueOutcome.UNREACHABLE:
            result = requeue(
                job_id, attempt=attempt, restarts=restarts, set_requeue_flag=set_requeue_flag, patience_s=0.0
            )
            if result.outcome in {RequeueOutcome.REQUEUED, RequeueOutcome.CANCELLED}:
                return result
        elif cause is not Cause.PREEMPTION:
            return result
    return result


def wait_for_controller(job_id: str) -> None:
    """Wait until the controller responds again; if the job is preempted meanwhile, Slurm ends this process."""
    wait_until(lambda: ask_slurm(job_id), timeout_s=_LONGEST_GRACE_S, poll_s=_LONG_POLL_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class LastLook:
    """What slurmctld says last before the script of a requeued job ends.

    Args:
        job: the fields of the job.
        start: when Slurm starts the job again, in words.
        is_in_time: whether half of the delay was left when slurmctld had answered.
    """

    job: Mapping[str, str] | None
    start: str
    is_in_time: bool


def leave(job_id: str, *, attempt: AttemptDirectory, restarts: int, set_requeue_flag: bool) -> RequeueResult:
    """Prepare to end the script of a job that has been requeued; return whether it still is, and when it starts.

    Call it last: what ends later than the start time that is set here gets Slurm's own start time. A last answer of
    slurmctld shows that it is there, and that it still knows of the requeue.

    Args:
        job_id: the job, which has been requeued and is still ending.
        attempt: the attempt that ends.
        restarts: the restart count of this attempt.
        set_requeue_flag: whether to set Requeue=1 first (a --no-requeue job).
    """
    deadline = time.monotonic() + PATIENCE_S
    for _ in range(_TRIES):
        last_look = _look_when_slurmctld_is_there(job_id, attempt.run, deadline)
        if last_look is None:
            break
        cause = _cause(last_look.job, attempt, restarts)
        if cause is Cause.CANCELLED:
            return RequeueResult(outcome=RequeueOutcome.CANCELLED)
        if cause is Cause.REQUEUED and last_look.is_in_time:
            return RequeueResult(outcome=RequeueOutcome.REQUEUED, start=last_look.start)
        if cause is not Cause.REQUEUED:
            write_message(_LOST.format(job_id=job_id))
            result = requeue(job_id, attempt=attempt, restarts=restarts, set_requeue_flag=set_requeue_flag)
            if result.outcome is not RequeueOutcome.REQUEUED:
                return result
    return RequeueResult(outcome=RequeueOutcome.REQUEUED, start="after Slurm's delay, which is two minutes by default")


def _look_when_slurmctld_is_there(job_id: str, run: RunDirectory, deadline: float) -> LastLook | None:
    """Return the last look; None, with a message, if slurmctld does not answer before ``deadline`` (monotonic)."""
    is_first = True
    while True:
        try:
            return _last_look(job_id, run)
        except commands.SlurmCommandError as error:
            if not is_transient(error) or time.monotonic() >= deadline:
                write_message(error.message)
                return None
        if is_first:
            write_message(f"{_STAYS}, for up to {PATIENCE_S:g} s")
        is_first = False
        time.sleep(_PAUSE_S)


def _last_look(job_id: str, run: RunDirectory) -> LastLook:
    """Set the start time of a job, and look at the job: Slurm itself waits until the old credentials have expired.

    Raises:
        SlurmCommandError: slurmctld does not answer, or refused the request.
    """
    controller = ask_controller(os.environ)
    asked_at = time.monotonic()
    delay_s = start_delay_s(run, slurms_delay_s=controller.requeue_delay_s)
    start_time = _time_from_now(controller, delay_s)
    commands.update_job(job_id, StartTime=_slurm_time(start_time))
    job = commands.show_job(job_id)
    clock = time.strftime("%H:%M:%S", time.localtime(start_time))
    is_in_time = time.monotonic() - asked_at < delay_s / 2
    return LastLook(job=job, start=f"at {clock}, if its nodes are free then", is_in_time=is_in_time)


def forbid_requeue(job_id: str) -> None:
    """Set Requeue=0, so that a job that is about to end for good is not run again.

    Slurm 24.05 to 26.05.3 requeue a job that was once preempted with a grace time at its next end too, whatever its
    exit code; and later versions one that ends by itself within the grace time (``docs/slurm-versions.md``).
    """
    try:
        commands.update_job(job_id, Requeue="0")
    except commands.SlurmCommandError as error:
        write_message(error.message)


def start_delay_s(run: RunDirectory, *, slurms_delay_s: float) -> int:
    """Return the seconds to set between the end of an attempt and the start of the next one.

    A job that still ends at the start time that was set, because of a slow epilog for example, gets Slurm's own delay.
    A run that has waited for that long before gets more time to end. It is never 0: a start in the very moment of the
    requeue failed one time in five (measured).

    Args:
        slurms_delay_s: how long a requeued job waits without a start time of its own, in seconds.
    """
    if not run.path.is_dir():
        return DIRECTORY_AWAY_DELAY_S
    events: list[Event] = []
    with suppress(RecordError):
        events = [event for event in read_events(run.events) if event.kind in {"requeue", "resume", "start"}]
    # The time of the event is that of the end, not yet that of the requeue.
    earliest_s = slurms_delay_s - 3
    latest_s = slurms_delay_s + _SCHEDULER_INTERVAL_S
    for before, after in pairwise(events):
        is_start_after_requeue = before.kind == "requeue" and after.kind == "start"
        # Nothing was set for a requeue that is found only at the next start.
        if is_start_after_requeue and not before.facts.get("found_at_start"):
            delay_s = after.time - before.time
            if earliest_s <= delay_s <= latest_s:
                return _SLOW_END_DELAY_S
    return _START_DELAY_S


def set_start(job_id: str, delay_s: float) -> None:
    """Set the start time of a job, in seconds from now by slurmctld's clock; print why that is not possible."""
    try:
        controller = ask_controller(os.environ)
        commands.update_job(job_id, StartTime=_slurm_time(_time_from_now(controller, delay_s)))
    except commands.SlurmCommandError as error:
        write_message(error.message)


def _time_from_now(controller: Controller, delay_s: float) -> float:
    """Return the time after a delay, by slurmctld's clock, in seconds since the epoch."""
    now = time.time() if controller.now is None else controller.now
    return now + delay_s


def _slurm_time(moment: float) -> str:
    """Return a time as Slurm reads it, in seconds since the epoch."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(moment))


def _cause(job: Mapping[str, str] | None, attempt: AttemptDirectory, restarts: int) -> Cause:
    """Return why an attempt of the job ends, by its record and slurmstepd's notices."""
    return cause_of(job, restarts_at_start=restarts, cancelled=cancelled_in_log(attempt))


def _poll_job(job_id: str, attempt: AttemptDirectory, restarts: int, *, patience_s: float) -> Cause:
    """Poll the job until it is requeued or cancelled; return the cause."""
    for _ in range(_MAX_POLLS):
        cause = _cause(ask_slurm(job_id, patience_s=patience_s), attempt, restarts)
        if cause in _OUTCOME_OF_CAUSE:
            return cause
        time.sleep(_POLL_S)
    return Cause.UNKNOWN
