"""The run's own event log: one JSON line per event, appended by whoever saw it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from hpcddp.run.files import append_line

EventKind = Literal[
    "start", "train", "signal", "stop", "save", "requeue", "resume", "failure", "finish", "warning", "progress"
]


def append_event(
    path: Path,
    *,
    kind: EventKind,
    time: float,
    attempt: int,
    step: int | None = None,
    reason: str | None = None,
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
        facts: what else is known, by name.
    """
    document = {"event": kind, "time": time, "attempt": attempt, "step": step, "reason": reason, **facts}
    append_line(path, json.dumps(document, ensure_ascii=False))


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events of a run in the order in which they were written; a torn last line is passed over."""
    if not path.is_file():
        return []
    events: list[dict[str, Any]] = []
    # A torn line may end within a character.
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return events
