"""Decide what happens after an attempt, by a table of pure functions; budgets are counted in the event log."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from hpcddp.jobfile.job import JobSpec
from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.events import Event, append_event, read_events
from hpcddp.stop.reasons import Cause, ExitCode

# Errors that say nothing against the user's code: a peer or a node was lost, or a rank hung.
_INFRASTRUCTURE = frozenset({ExitCode.INFRASTRUCTURE, ExitCode.HANG})
_NAMEABLE = frozenset({Cause.PREEMPTION, Cause.TIME_LIMIT, Cause.NODE_FAILURE})


class ActionKind(StrEnum):
    """What the supervisor does."""

    FINISH = "finish"
    """Nothing: the run's result is there."""
    FENCED = "fenced"
    """Nothing at all: a newer attempt owns the run."""
    REQUEUE = "requeue"
    """Have Slurm run the job again."""
    LEAVE_TO_SLURM = "leave_to_slurm"
    """Slurm has requeued the job already; only set an earlier StartTime."""
    CONTINUE = "continue"
    """Submit another job for the same run."""
    STOP = "stop"
    """End the run where it can be resumed manually."""
    CANCEL = "cancel"
    """End the run, as its user asked."""
    FAIL = "fail"
    """End the run as failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndFacts:
    """The input of the decision at the end of an attempt.

    Args:
        cause: why it ended, according to Slurm, the ranks' decision or this machine.
        finished: whether the run has a result that says so.
        fenced: whether a newer attempt of the run exists.
        error_code: the exit code that the first error asks for; None without an error that names a cause of its own.
        on_slurm: whether the job is one of Slurm's.
        in_allocation: whether the run is a local one whose tasks are in an allocation.
        requeue_allowed: whether Slurm may requeue the job.
        causes: the causes after which the user wants the job requeued.
        requested: whether the run's user has requested a requeue; no budget counts that.
        stuck: why a run without progress must end, or None.
        used_up: which budget is used up, or None.
        allow_continuation: whether another job may continue the run where requeue is forbidden.
    """

    cause: Cause
    finished: bool = False
    fenced: bool = False
    error_code: int | None = None
    on_slurm: bool = True
    in_allocation: bool = False
    requeue_allowed: bool = True
    causes: frozenset[Cause] = _NAMEABLE
    requested: bool = False
    stuck: str | None = None
    used_up: str | None = None
    allow_continuation: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What to do.

    Args:
        kind: what the supervisor does.
        exit_code: what the batch script exits with.
        why: why the run is not requeued, in words that follow "because"; empty when it is.
    """

    kind: ActionKind
    exit_code: int
    why: str = ""


def decide(facts: EndFacts) -> Action:
    """Return what to do at the end of an attempt; the first row that fits wins.

    Args:
        facts: what is known.
    """
    return next(action for row in _ROWS if (action := row(facts)) is not None)


def _is_over(facts: EndFacts) -> Action | None:
    if facts.fenced:
        return Action(kind=ActionKind.FENCED, exit_code=ExitCode.FENCED)
    if facts.finished:
        return Action(kind=ActionKind.FINISH, exit_code=ExitCode.FINISHED)
    return None


def _failed_by_itself(facts: EndFacts) -> Action | None:
    """An error with a cause of its own comes before what Slurm did: started again, the job would fail again."""
    if facts.error_code is None or facts.error_code in _INFRASTRUCTURE:
        return None
    return Action(kind=ActionKind.FAIL, exit_code=facts.error_code)


def _is_cancelled(facts: EndFacts) -> Action | None:
    return Action(kind=ActionKind.CANCEL, exit_code=ExitCode.INTERRUPTED) if facts.cause is Cause.CANCELLED else None


def _requeued_by_slurm(facts: EndFacts) -> Action | None:
    """A job that Slurm has requeued starts again in any case; the next start checks the budgets."""
    if facts.cause is not Cause.REQUEUED or facts.requested:
        return None
    return Action(kind=ActionKind.LEAVE_TO_SLURM, exit_code=ExitCode.STOPPED)


def _is_over_budget(facts: EndFacts) -> Action | None:
    if facts.requested:
        return None
    if facts.stuck is not None:
        return Action(kind=ActionKind.FAIL, exit_code=ExitCode.NO_PROGRESS, why=facts.stuck)
    if facts.used_up is None:
        return None
    if facts.cause is Cause.CRASH:
        return Action(kind=ActionKind.FAIL, exit_code=facts.error_code or ExitCode.INFRASTRUCTURE, why=facts.used_up)
    return Action(kind=ActionKind.FAIL, exit_code=ExitCode.NO_PROGRESS, why=facts.used_up)


def _is_not_wanted(facts: EndFacts) -> Action | None:
    """The causes that ``requeue.causes`` can name lead to a requeue only if it names them."""
    if facts.cause not in _NAMEABLE or facts.cause in facts.causes:
        return None
    return Action(kind=ActionKind.STOP, exit_code=ExitCode.STOPPED, why=f"requeue.causes does not name {facts.cause}")


def _is_forbidden(facts: EndFacts) -> Action | None:
    if not facts.on_slurm and facts.cause is Cause.CRASH:
        return Action(kind=ActionKind.FAIL, exit_code=facts.error_code or ExitCode.INFRASTRUCTURE)
    if not facts.on_slurm:
        runs = "runs in an allocation" if facts.in_allocation else "runs on this machine"
        return Action(kind=ActionKind.STOP, exit_code=ExitCode.STOPPED, why=f"{runs} are not requeued")
    if facts.requeue_allowed:
        return None
    if facts.allow_continuation:
        return Action(kind=ActionKind.CONTINUE, exit_code=ExitCode.STOPPED)
    return Action(
        kind=ActionKind.STOP, exit_code=ExitCode.STOPPED, why="Slurm is not allowed to requeue it (Requeue=0)"
    )


def _requeue(_: EndFacts) -> Action:
    return Action(kind=ActionKind.REQUEUE, exit_code=ExitCode.STOPPED)


_ROWS: tuple[Callable[[EndFacts], Action | None], ...] = (
    _is_over,
    _failed_by_itself,
    _is_cancelled,
    _requeued_by_slurm,
    _is_over_budget,
    _is_not_wanted,
    _is_forbidden,
    _requeue,
)


# What each cause is counted as. The others have no limit of their own: a lost node, a requeue by an
# administrator, and what the run's own code asks for. Attempts without progress end the run all the same.
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
    """How often a run may be requeued for each cause; None has no limit.

    Args:
        preemptions: requeues after a preemption.
        time_limits: requeues after a time limit.
        failures: requeues after an infrastructure failure.
        attempts_without_progress: attempts in a row that made no progress.
        of_program: whether the work is a program of the user's own, which has a file as its progress indicator.
    """

    preemptions: int | None
    time_limits: int
    failures: int
    attempts_without_progress: int
    of_program: bool = False


def limits_of(spec: JobSpec) -> Limits:
    """Return how often a job may be started again."""
    requeue = spec.requeue
    return Limits(
        preemptions=requeue.max_preemptions,
        time_limits=requeue.max_time_limits,
        failures=requeue.max_failures,
        attempts_without_progress=requeue.max_attempts_without_progress,
        of_program=spec.command is not None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """How often a run was requeued for each cause since a person last submitted it.

    Args:
        preemptions: requeues after a preemption.
        time_limits: requeues after a time limit.
        failures: requeues after an infrastructure failure.
        attempts_without_progress: attempts in a row, up to the newest, that saved no newer step than all before them,
            and in which no program of the user's own made progress.
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
        elif kind == "save" and (event.step or 0) > newest_step:
            newest_step, idle = event.step or 0, 0
        elif kind == "progress":
            idle = 0
        elif kind == "requeue" and event.by == "user":
            # The user who requests another attempt knows what it may cost.
            idle -= idle > 0
        elif kind == "requeue" and (counted := _COUNTED_AS.get(event.known_cause)) is not None:
            counts[counted] += 1
            # Preempted before it could train: that says nothing about the run.
            idle -= counted == "preemptions" and not trained and idle > 0
    return Spent(**counts, attempts_without_progress=idle)


def is_interruption(cause: Cause) -> bool:
    """Return whether ``cause`` is not due to the work itself, and requeues after it have a budget of their own."""
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
    """Return why a run must not start once more, or None while it may: Slurm may have requeued it on its own.

    Args:
        spent: what has been used, the requeue that leads to this start included.
        limits: what is allowed.
    """
    for counted, field in _FIELDS.items():
        allowed = getattr(limits, counted)
        if allowed is not None and getattr(spent, counted) > allowed:
            return f"{field} is {allowed}, and this would be one more"
    return stuck(spent, limits)


def record_progress(attempt: AttemptDirectory, *, now: float, interrupted: bool) -> None:
    """Record that an attempt of a command made progress, unless it is known that it made none.

    Once a program touches ``HPCDDP_PROGRESS_FILE``, its file is used as the progress indicator. One that never does may
    have checkpoints of its own, so that an interruption counts as progress. Any other requeue counts as an attempt
    without progress.

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
        counts = not interrupted or any(event.kind == "save" for event in events)
        if not counts:
            reason = "the program does not report its progress"
            append_event(run.events, kind="progress", time=now, attempt=attempt.number, reason=reason)
        return
    if stamp not in stamps:
        reason = "the program has made progress"
        append_event(run.events, kind="progress", time=now, attempt=attempt.number, reason=reason, stamp=stamp)
