"""How often a run may start again: counted in its event log, compared with ``requeue.*`` of its job file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.sections import Requeue
from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.events import CONTINUATIONS, Event, append_event, read_events
from hpcddp.stop.reasons import Cause


@dataclass(frozen=True, slots=True)
class Budget:
    """A budget of requeues and restarts.

    Args:
        field: its field in the job file.
        limit: returns the largest number of requeues; None is no limit.
    """

    field: str
    limit: Callable[[Requeue], int | None]


# The other causes have no budget: a lost node, a requeue by an administrator, and what the program itself requests.
BUDGETS: Mapping[Cause, Budget] = MappingProxyType(
    {
        Cause.PREEMPTION: Budget("requeue.max_preemptions", lambda requeue: requeue.max_preemptions),
        Cause.TIME_LIMIT: Budget("requeue.max_time_limits", lambda requeue: requeue.max_time_limits),
        Cause.CRASH: Budget("requeue.max_failures", lambda requeue: requeue.max_failures),
    }
)


def count_requeues(events: Sequence[Event]) -> Mapping[Cause, int]:
    """Return how often a run went on after each cause, since a person last submitted it.

    It was requeued, or its tasks were started again. A requeue that the user of the run requested is not counted.
    """
    counts: Counter[Cause] = Counter()
    for event in events:
        if event.kind == "resume":
            counts.clear()
        elif event.kind in CONTINUATIONS and event.by != "user":
            counts[event.known_cause] += 1
    return counts


def count_attempts_without_progress(events: Sequence[Event]) -> int:
    """Return how many attempts in a row, up to the newest, made no progress, since a person last submitted the run.

    An attempt makes progress if it saves a newer step than all attempts before it, or if its program reports progress.
    After a damaged checkpoint the training goes on from an older one: what it saves from there on is new.
    Not counted are attempts that were preempted before they could train, and those whose user requested the requeue.
    """
    count = 0
    newest_step = 0
    has_trained = False
    for event in events:
        if event.kind == "start":
            count += 1
            has_trained = False
        elif event.kind == "train":
            has_trained = True
            if event.step is not None:
                newest_step = event.step
        elif event.kind == "resume":
            count = 0
            newest_step = 0
        elif event.kind == "progress":
            count = 0
        elif event.kind == "save" and (event.step or 0) > newest_step:
            newest_step = event.step or 0
            count = 0
        elif event.kind == "requeue":
            was_preempted_early = event.known_cause is Cause.PREEMPTION and not has_trained
            if event.by == "user" or was_preempted_early:
                count = max(0, count - 1)
    return count


def why_without_progress(attempts: int, spec: JobSpec) -> str | None:
    """Return why a run that makes no progress must not start again, or None while it may.

    Args:
        attempts: how many attempts in a row made no progress.
    """
    limit = spec.requeue.max_attempts_without_progress
    if attempts < limit:
        return None
    subject = "the last attempt" if attempts == 1 else f"the last {attempts} attempts"
    reached = f"requeue.max_attempts_without_progress is {limit}"
    if spec.command is None:
        return f"{subject} saved no new step, and {reached}"
    return (
        f"{subject} saved no new step, nor touched HPCDDP_PROGRESS_FILE, and {reached}; let the program touch that "
        "file each time it has saved"
    )


def why_used_up(requeues: Mapping[Cause, int], requeue: Requeue, cause: Cause) -> str | None:
    """Return why another requeue after ``cause`` is not allowed, or None while it is.

    Args:
        requeues: how often the run was requeued or restarted before, for each cause.
        requeue: the section of the job file.
        cause: why the attempt ended.
    """
    budget = BUDGETS.get(cause)
    if budget is None:
        return None
    limit = budget.limit(requeue)
    if limit is None or requeues.get(cause, 0) < limit:
        return None
    if limit == 0:
        return f"{budget.field} is 0"
    return f"{budget.field} is {limit}, and that is used up"


def why_exceeded(events: Sequence[Event], spec: JobSpec) -> str | None:
    """Return why a run must not start once more, or None while it may: Slurm may have requeued it by itself.

    Args:
        events: the events of the run, with the requeue that leads to this start.
    """
    requeues = count_requeues(events)
    for cause, budget in BUDGETS.items():
        limit = budget.limit(spec.requeue)
        if limit is not None and requeues.get(cause, 0) > limit:
            return f"{budget.field} is {limit}, and this would be one more"
    return why_without_progress(count_attempts_without_progress(events), spec)


def is_interruption(cause: Cause) -> bool:
    """Return whether a cause says nothing about the work itself: a preemption or a time limit."""
    return cause in {Cause.PREEMPTION, Cause.TIME_LIMIT}


def record_progress(attempt: AttemptDirectory, *, now: float, interrupted: bool) -> None:
    """Record that an attempt of a command made progress, unless it is known that it made none.

    Once a program has touched ``HPCDDP_PROGRESS_FILE``, this file shows its progress. A program that never does may
    have checkpoints of its own, so that an interruption counts as progress. Any other requeue counts as an attempt
    without progress.

    Args:
        attempt: the attempt that has ended.
        now: seconds since the epoch.
        interrupted: whether a preemption or a time limit ended it.
    """
    run = attempt.run
    events = read_events(run.events)
    try:
        # Compared with what it was before, never with a clock: the file server has its own.
        stamp = run.progress.stat().st_mtime_ns
    except FileNotFoundError:
        if interrupted and not any(event.kind == "save" for event in events):
            reason = "the program does not report its progress"
            append_event(run.events, kind="progress", time=now, attempt=attempt.number, reason=reason)
        return
    if stamp not in {event.stamp for event in events if event.kind == "progress"}:
        reason = "the program has made progress"
        append_event(run.events, kind="progress", time=now, attempt=attempt.number, reason=reason, stamp=stamp)
