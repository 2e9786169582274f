"""How often a run may be started again, counted in its own event log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.events import Event, append_event, read_events
from hpcddp.stop.reasons import Cause

# What each cause is counted as. The others have no limit of their own: a lost node, what somebody else requeues, and
# what the run's own code asks for. Attempts without progress end the run all the same.
_COUNTED_AS: Mapping[Cause, str] = MappingProxyType(
    {Cause.PREEMPTION: "preemptions", Cause.TIME_LIMIT: "time_limits", Cause.CRASH: "failures"}
)
_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "preemptions": "requeue.max_preemptions",
        "time_limits": "requeue.max_time_limits",
        "failures": "requeue.max_failures",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much of each a run is allowed; None has no limit.

    Args:
        preemptions: requeues after a preemption.
        time_limits: requeues after a time limit.
        failures: requeues after an infrastructure failure.
        attempts_without_progress: attempts in a row that made no progress.
        of_program: whether the work is a program of the user's own, which has a file to say that it came further.
    """

    preemptions: int | None
    time_limits: int
    failures: int
    attempts_without_progress: int
    of_program: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """How much of each a run has used since a person last submitted it.

    Args:
        preemptions: requeues after a preemption.
        time_limits: requeues after a time limit.
        failures: requeues after an infrastructure failure.
        attempts_without_progress: attempts in a row, up to the newest, that saved no newer step than all before them,
            and in which no program of the user's own came further.
    """

    preemptions: int = 0
    time_limits: int = 0
    failures: int = 0
    attempts_without_progress: int = 0


def spent_of(events: Sequence[Event]) -> Spent:
    """Return what a run has used up.

    Args:
        events: the run's events in their order. A ``resume`` event, by a person, begins the count anew; what was saved
            before it still counts as old.
    """
    counts = dict.fromkeys(_FIELDS, 0)
    newest_step, idle, trained = 0, 0, False
    for event in events:
        kind = event.kind
        trained = kind == "train" or (trained and kind != "start")
        if kind == "resume":
            counts, idle = dict.fromkeys(_FIELDS, 0), 0
        elif kind == "start":
            idle += 1
        elif kind == "save" and event.reason != "failed" and (event.step or 0) > newest_step:
            newest_step, idle = event.step or 0, 0
        elif kind == "progress":
            idle = 0
        elif kind == "requeue" and event.by == "user":
            # Whoever asks for another attempt knows what it may cost.
            idle -= idle > 0
        elif kind == "requeue" and (counted := _COUNTED_AS.get(event.known_cause)) is not None:
            counts[counted] += 1
            # Preempted before it could train: that says nothing about the run.
            idle -= counted == "preemptions" and not trained and idle > 0
    return Spent(**counts, attempts_without_progress=idle)


def is_interruption(cause: Cause) -> bool:
    """Return whether ``cause`` says nothing of the work itself, and restarts after it have a limit of their own."""
    return cause in {Cause.PREEMPTION, Cause.TIME_LIMIT}


def stuck(spent: Spent, limits: Limits) -> str | None:
    """Return why a run that makes no progress must not start again, or None while it may."""
    attempts = spent.attempts_without_progress
    if attempts < limits.attempts_without_progress:
        return None
    times = "the last attempt" if attempts == 1 else f"the last {attempts} attempts"
    nothing = "saved no new step" + (", nor touched HPCDDP_PROGRESS_FILE" if limits.of_program else "")
    return f"{times} {nothing}, and requeue.max_attempts_without_progress is {limits.attempts_without_progress}"


def used_up(spent: Spent, limits: Limits, cause: Cause) -> str | None:
    """Return why one more requeue after ``cause`` is not allowed, or None while it is.

    Args:
        spent: what has been used before.
        limits: what is allowed.
        cause: why the attempt ended.
    """
    counted = _COUNTED_AS.get(cause)
    if counted is None:
        return None
    allowed, used = getattr(limits, counted), getattr(spent, counted)
    if allowed is None or used < allowed:
        return None
    return f"{_FIELDS[counted]} is {allowed}" + (", all used up" if allowed else "")


def exceeded(spent: Spent, limits: Limits) -> str | None:
    """Return why a run must not start once more, or None while it may: Slurm may have requeued it without asking.

    Args:
        spent: what has been used, the requeue that leads to this start included.
        limits: what is allowed.
    """
    for counted, field in _FIELDS.items():
        allowed = getattr(limits, counted)
        if allowed is not None and getattr(spent, counted) > allowed:
            return f"{field} is {allowed}, and this would be one more"
    return stuck(spent, limits)


def tell_progress(attempt: AttemptDirectory, *, now: float, interrupted: bool) -> None:
    """Write down that an attempt of a command made progress, unless it is known that it made none.

    A program that touches ``HPCDDP_PROGRESS_FILE`` is taken at its word from then on. One that never does may well have
    checkpoints of its own, so that an interruption says nothing against it. Any other restart counts as one without
    progress.

    Args:
        attempt: the attempt that has ended.
        now: seconds since the epoch.
        interrupted: whether a preemption or a time limit ended it.
    """
    run = attempt.run
    events = read_events(run.events)
    stamps = [event.stamp for event in events if event.kind == "progress"]
    try:
        # Compared with what it was before, never with a clock: the file server has its own.
        stamp = run.progress.stat().st_mtime_ns
    except FileNotFoundError:
        speaks = not interrupted or any(event.kind == "save" for event in events)
        if not speaks:
            reason = "the program does not say how far it is"
            append_event(run.events, kind="progress", time=now, attempt=attempt.number, reason=reason)
        return
    if stamp not in stamps:
        reason = "the program has come further"
        append_event(run.events, kind="progress", time=now, attempt=attempt.number, reason=reason, stamp=stamp)
