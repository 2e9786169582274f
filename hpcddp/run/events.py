"""The event log of a run, ``events.jsonl``: one JSON line for each event, appended by the process that saw it.

``hpcddp.supervise.end`` records what came of an attempt when its script ends. Where that script could not, because
its node was lost for example, ``hpcddp.supervise.begin`` records Slurm's requeue at the next start.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Self

from hpcddp.run.files import append_line
from hpcddp.run.record import FORMAT, LATEST_TIME, Lines, Record, read_last_lines
from hpcddp.slurm.job import moment_of
from hpcddp.stop.reasons import Cause

EventKind = Literal[
    "start",
    "train",
    "signal",
    "cancel",
    "cause",
    "stop",
    "save",
    "requeue",
    "exclusion",
    "restart",
    "resume",
    "failure",
    "finish",
    "warning",
    "refusal",
    "progress",
    "code",
    "account",
]
_KIND = "event"
CONTINUATIONS: Final = frozenset({"requeue", "restart"})
"""Kinds of events with which a run goes on after an attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event(Record):
    """One event. A later version may have other kinds.

    Args:
        kind: what happened, an ``EventKind``; its key in the file is ``event``.
        time: seconds since the epoch.
        attempt: the attempt that it happened in.
        step: the optimizer step, where there is one.
        reason: why, in a few words.
        cause: why an attempt ends or has ended, a ``Cause``'s word; None for other events.
        host: where an attempt starts, or a signal arrives.
        by: who has requeued or restarted the job: ``user``, ``slurm`` or ``hpcddp``; ``chain`` if its next job goes on.
        saved: whether the ranks that stopped have saved their state; None where no rank says so.
        stamp: the time of the last change of ``HPCDDP_PROGRESS_FILE``, in nanoseconds.
        facts: what else is known, by name.
    """

    ADVICE: ClassVar[str] = "its line is left out"

    kind: str
    time: float
    attempt: int
    step: int | None = None
    reason: str | None = None
    cause: str | None = None
    host: str | None = None
    by: str | None = None
    saved: bool | None = None
    stamp: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.time < LATEST_TIME:
            raise ValueError("its time is out of range")

    @property
    def known_cause(self) -> Cause:
        """The cause; ``UNKNOWN`` if the event names none, or one of a newer version."""
        return next((cause for cause in Cause if cause == self.cause), Cause.UNKNOWN)

    @classmethod
    def from_document(cls, document: object) -> Self:
        """Return the event of a JSON object; raises ``ValueError`` as ``Record`` does."""
        if isinstance(document, dict):
            document = {"kind" if name == _KIND else name: value for name, value in document.items()}
        return super(Event, cls).from_document(document)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowestRank:
    """The rank that needed most time in a step for its data and its forward, in which it waits for no other rank.

    Args:
        data_wait_s: its wait for data in a step, the mean in seconds.
        forward_s: its forward in a step, the mean in seconds; None if the forward waits for other ranks.
        median_s: both of the median rank; of two ranks, that of the faster one.
    """

    rank: int
    data_wait_s: float
    forward_s: float | None
    median_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Account(Record):
    """What the time of an attempt went into from its first step to a save, as rank 0 records it at the save.

    Args:
        step: the step of the save.
        time: when the training went on after the save, in seconds since the epoch.
        train_s: the durations of the steps.
        eval_s: the durations of the evaluations.
        save_s: how long the training waited for saves.
        wait_s: how long the steps waited for data, on the rank that waited longest; a part of ``train_s``.
        slowest: the slowest rank; None with one rank, and before the second step.
    """

    ADVICE: ClassVar[str] = "the account before it counts"

    step: int
    time: float
    train_s: float
    eval_s: float
    save_s: float
    wait_s: float
    slowest: SlowestRank | None = None

    def __post_init__(self) -> None:
        if not all(0 <= seconds < LATEST_TIME for seconds in (self.train_s, self.eval_s, self.save_s, self.wait_s)):
            raise ValueError("a time in it is out of range")


def accounts_of(events: Iterable[Event]) -> list[Account]:
    """Return the accounts in an event log; one with numbers that cannot be is left out."""
    accounts = []
    for event in events:
        if event.kind == "account":
            with suppress(ValueError):
                document = {**event.facts, "format": FORMAT, "step": event.step, "time": event.time}
                accounts.append(Account.from_document(document))
    return accounts


def append_event(
    path: Path,
    *,
    kind: EventKind,
    time: float,
    attempt: int,
    step: int | None = None,
    reason: str | None = None,
    cause: str | None = None,
    **facts: object,
) -> None:
    """Append one event to the run's ``events.jsonl``; the arguments and the facts are those of ``Event``."""
    cause_of_end = {} if cause is None else {"cause": cause}
    document = {_KIND: kind, "time": time, "attempt": attempt, "step": step, "reason": reason, **cause_of_end, **facts}
    append_line(path, json.dumps({**document, "format": FORMAT}, ensure_ascii=False))


def read_event_log(path: Path, size: int = sys.maxsize) -> Lines[Event]:
    """Return the events of a run in the order in which they were written, and how many lines are damaged.

    Args:
        path: the run's ``events.jsonl``; it need not exist.
        size: how many bytes of its end are read at most.

    Raises:
        RecordError: it cannot be read.
    """
    return read_last_lines(path, Event, size)


def read_events(path: Path, size: int = sys.maxsize) -> list[Event]:
    """Return the events of a run; a damaged line is left out.

    Args:
        size: how many bytes of its end are read; what is counted over a whole run needs all of them.

    Raises:
        RecordError: the log cannot be read.
    """
    return list(read_event_log(path, size).records)


RECENT_BYTES: Final = 8 << 20
"""The end of an event log that is shown to a person: some 50,000 events."""


def newest_saved_step(events: Iterable[Event]) -> int:
    """Return the newest step that the events say was saved, or 0.

    A training that goes on from an older step has found the newer checkpoints damaged.
    """
    newest_step = 0
    for event in events:
        if event.kind == "train" and event.step is not None:
            newest_step = event.step
        elif event.kind == "save":
            newest_step = max(newest_step, event.step or 0)
    return newest_step


def first_train_event(events: Sequence[Event], number: int) -> Event | None:
    """Return the event with which an attempt began to train; None if it did not.

    A built-in training records it with the step that it goes on from; a program of the user's own is started then, and
    the event has no step.
    """
    return next((event for event in events if event.kind == "train" and event.attempt == number), None)


_END_KINDS: Final = frozenset({"finish", "failure", "stop", "requeue", "restart"})
# Slurm's times are whole seconds.
_SLURM_CLOCK_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NextStart:
    """The start of the attempt that followed.

    Args:
        time: when its script began, in seconds since the epoch.
        submit_time: Slurm's SubmitTime of it; None without Slurm.
    """

    time: float
    submit_time: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnd:
    """How and when an attempt ended, as far as it is recorded.

    Args:
        time: when it ended, in seconds since the epoch; its last sign of life where the end is not known.
        is_time_known: whether the end was recorded, or Slurm's requeue of the job shows it.
        kinds: the kinds of the events that recorded it, in their order; empty without a record.
        cause: why it ended; ``UNKNOWN`` where no event says so.
    """

    time: float
    is_time_known: bool
    kinds: tuple[str, ...]
    cause: Cause

    @property
    def continuation(self) -> Literal["requeued", "restarted"] | None:
        """How the run went on: Slurm ran the job again, or another one; or its tasks were started again in its job."""
        if "requeue" in self.kinds:
            return "requeued"
        return "restarted" if "restart" in self.kinds else None


def requeue_event(events: Sequence[Event], number: int) -> Event | None:
    """Return the event of the requeue after an attempt; None if it was not requeued."""
    return next((event for event in events if event.attempt == number and event.kind == "requeue"), None)


def attempt_end(events: Sequence[Event], number: int, *, last_sign: float, next_start: NextStart | None) -> AttemptEnd:
    """Return the end of an attempt that does not run any more.

    Args:
        events: the event log of the run.
        number: the number of the attempt.
        last_sign: when it was seen alive by other records than the event log, in seconds since the epoch; its start at
            least.
        next_start: the start that followed; None if it is the newest attempt.
    """
    ends = _end_events(events, number)
    time, is_time_known = _time_of_end(events, number, last_sign, next_start)
    causes = [event.known_cause for event in ends if event.known_cause is not Cause.UNKNOWN]
    return AttemptEnd(
        time=time,
        is_time_known=is_time_known,
        kinds=tuple(event.kind for event in ends),
        cause=causes[0] if causes else Cause.UNKNOWN,
    )


def events_of_attempt(events: Sequence[Event], number: int, next_start: NextStart | None) -> list[Event]:
    """Return what an attempt recorded itself, without what a later start or submission recorded of it."""
    written = [event for event in events if event.attempt == number and event.kind != "resume"]
    if next_start is None:
        return written
    return [event for event in written if event.time < next_start.time]


def _time_of_end(
    events: Sequence[Event], number: int, last_sign: float, next_start: NextStart | None
) -> tuple[float, bool]:
    """Return when an attempt ended, in seconds since the epoch, and whether that is known."""
    written = events_of_attempt(events, number, next_start)
    script_end = _event_of_script_end(written, number)
    if script_end is not None:
        return script_end.time, True
    last_sign = max([last_sign, *(event.time for event in written)])
    if _end_events(written, number):
        # The ranks recorded that they had finished or stopped, and the script nothing after that.
        return last_sign, True
    # Slurm renews the submit time when it requeues a job, which is when the job has lost its nodes.
    requeue_time = None if next_start is None else moment_of(next_start.submit_time)
    if requeue_time is None or next_start is None:
        return last_sign, False
    if not last_sign - _SLURM_CLOCK_S <= requeue_time <= next_start.time + _SLURM_CLOCK_S:
        return last_sign, False
    return min(max(requeue_time, last_sign), next_start.time), True


def _event_of_script_end(events: Sequence[Event], number: int) -> Event | None:
    """Return the event that the batch script recorded when it ended; None if it recorded none."""
    requeue = requeue_event(events, number)
    if requeue is not None:
        return requeue
    for event in _end_events(events, number):
        is_of_ranks = event.kind == "finish" or event.saved is not None
        if not is_of_ranks:
            # A later one is of a run that was cancelled while it waited to run again.
            return event
    return None


def _end_events(events: Sequence[Event], number: int) -> list[Event]:
    """Return the events that record the end of an attempt, in their order."""
    return [event for event in events if event.attempt == number and event.kind in _END_KINDS]
