"""What the records of a run say of its attempts: the input of ``hpcddp.manage.attempt_times``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from hpcddp.errors import HpcddpError
from hpcddp.manage.run_metrics import AttemptStart, Stretch
from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.events import Event, first_train_event
from hpcddp.run.failure import is_hang, read_failures
from hpcddp.run.job_records import Start, SubmissionRecord, read_exits
from hpcddp.run.source import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecords:
    """What the records say of one attempt, but for the event log and the metrics.

    Args:
        began: when its batch script began, in seconds since the epoch.
        queued: when its job was queued; None if that is not known.
        submit_time: Slurm's SubmitTime of its start, renewed at every requeue.
        ranks: how many it has; None if that is not known.
        alive_times: other times at which it was alive: its records of failures and exits.
        failed_at: when its first failure was recorded; None if none was.
        failure_step: the last step that a record of a failure names.
        is_hang: whether a rank failed because it, or another one, no longer made steps.
    """

    number: int
    began: float
    queued: float | None = None
    submit_time: str | None = None
    ranks: int | None = None
    alive_times: tuple[float, ...] = ()
    failed_at: float | None = None
    failure_step: int | None = None
    is_hang: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecords:
    """What the records say of a run.

    Args:
        attempts: its attempts, in their order.
        stretches: the lines of metrics of each attempt.
        is_alive: whether its newest attempt runs.
        is_finished: whether it has come to its own end.
        now: seconds since the epoch.
    """

    attempts: Sequence[AttemptRecords]
    events: Sequence[Event]
    stretches: Sequence[Sequence[Stretch]] = ()
    is_alive: bool = False
    is_finished: bool = False
    now: float = 0.0


def read_attempt_records(
    attempt: AttemptDirectory, start: Start, *, queued: float | None, ranks: int | None
) -> AttemptRecords:
    """Return what the records say of an attempt; records of exits that cannot be read are left out.

    Args:
        queued: when its job was queued, in seconds since the epoch; None if that is not known.
        ranks: how many it has; None if that is not known.
    """
    failures = read_failures(attempt)
    exits = []
    with suppress(HpcddpError):
        exits = read_exits(attempt)
    failure_times = [failure.time for failure in failures]
    exit_times = [program_exit.time for program_exit in exits]
    return AttemptRecords(
        number=attempt.number,
        began=start.time,
        queued=queued,
        submit_time=start.submit_time,
        ranks=ranks,
        alive_times=(*failure_times, *exit_times),
        failed_at=min(failure_times, default=None),
        failure_step=max((failure.step for failure in failures if failure.step is not None), default=None),
        is_hang=is_hang(attempt, failures),
    )


def queue_time(
    number: int,
    start: Start,
    *,
    previous_began: float | None,
    events: Sequence[Event],
    submission: SubmissionRecord | None,
    sources: Sequence[Source],
) -> float | None:
    """Return when the job of an attempt was queued, in seconds since the epoch; None if that is not known.

    That was at its submission, its requeue or its resumption, whichever was the last before its start.

    Args:
        number: the number of the attempt.
        previous_began: when the attempt before began, in seconds since the epoch; None for the first one.
        events: the event log of the run.
        submission: the newest submission of the run.
        sources: what its submissions would run.
    """
    earliest = -math.inf if previous_began is None else previous_began
    times = [
        event.time for event in events if event.kind in {"requeue", "resume"} and earliest < event.time < start.time
    ]
    times += [source.time for source in sources if source.attempt == number and earliest < source.time <= start.time]
    if number == 0 and submission is not None and submission.job_id == start.job_id and submission.time <= start.time:
        times.append(submission.time)
    return max(times, default=None)


def start_in_log(events: Sequence[Event], number: int) -> Start | None:
    """Return the start of an attempt whose own record of it cannot be read, from the event log; None without one."""
    for event in events:
        if event.kind == "start" and event.attempt == number:
            return Start(job_id=None, host=event.host or "", time=event.time, is_local=False)
    return None


def attempt_start(attempt: AttemptRecords, events: Sequence[Event]) -> AttemptStart:
    """Return when an attempt began, and when its first step began, which only a built-in training records."""
    train_event = first_train_event(events, attempt.number)
    if train_event is None or train_event.step is None:
        return AttemptStart(began=attempt.began)
    return AttemptStart(began=attempt.began, trained=train_event.time)
