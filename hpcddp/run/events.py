"""The event log of a run, ``events.jsonl``: one JSON line for each event, appended by the process that saw it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from hpcddp.run.files import append_line
from hpcddp.run.record import FORMAT, Lines, Record, read_last_lines
from hpcddp.stop.reasons import Cause

EventKind = Literal[
    "start", "train", "signal", "stop", "save", "requeue", "resume", "failure", "finish", "warning", "progress"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event(Record):
    """One event; arguments as ``append_event`` has them. A later version may have other kinds.

    Args:
        event: what happened.
        cause: why an attempt ended, a ``Cause``'s word; None for other events.
    """

    ADVICE: ClassVar[str] = "its line is left out"

    event: str
    time: float
    attempt: int
    step: int | None = None
    reason: str | None = None
    cause: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the event as a JSON object, without the version of its layout."""
        cause = {} if self.cause is None else {"cause": self.cause}
        document = {"event": self.event, "time": self.time, "attempt": self.attempt}
        return {**document, "step": self.step, "reason": self.reason, **cause, **self.facts}


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
    """Append one event.

    Args:
        path: the run's ``events.jsonl``.
        kind: what happened.
        time: seconds since the epoch.
        attempt: the attempt that it happened in.
        step: the optimizer step, where there is one.
        reason: why, in a few words.
        cause: why the attempt ended, a ``Cause``'s word.
        facts: what else is known, by name.
    """
    event = Event(event=kind, time=time, attempt=attempt, step=step, reason=reason, cause=cause, facts=facts)
    document = {**event.as_json(), "format": FORMAT}
    append_line(path, json.dumps(document, ensure_ascii=False))


def read_event_log(path: Path, size: int = sys.maxsize) -> Lines[Event]:
    """Return the events of a run in the order in which they were written.

    Args:
        path: the run's ``events.jsonl``; it need not exist.
        size: how many bytes of its end are read at most.

    Raises:
        RecordError: it cannot be read.
    """
    return read_last_lines(path, Event, size)


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events of a run as JSON objects that were checked; a damaged line is left out.

    Raises:
        RecordError: the log cannot be read.
    """
    return [event.as_json() for event in read_event_log(path).records]


def cause_of_event(event: Mapping[str, Any]) -> Cause:
    """Return the cause that an event names; ``UNKNOWN`` if it names none, or one of a newer version."""
    return next((cause for cause in Cause if cause == event.get("cause")), Cause.UNKNOWN)
