"""The lines of ``metrics.jsonl``: one for each optimizer step and for each evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from hpcddp.run.record import Lines, Record, read_last_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsLine(Record):
    """What was measured at a step. A function of the user's own may log what it likes.

    Args:
        step: optimizer steps done.
        time: when, in seconds since the epoch; an evaluation has no time of its own.
        facts: what was measured, by name.
    """

    ADVICE: ClassVar[str] = "its line is left out"
    IS_VERSIONED: ClassVar[bool] = False

    step: int
    time: float | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    def number(self, name: str) -> float | None:
        """Return a measured number; None if it was not measured, or is no number."""
        value = self.facts.get(name)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    def as_json(self) -> dict[str, Any]:
        """Return the line as a JSON object."""
        return {"step": self.step, **({} if self.time is None else {"time": self.time}), **self.facts}


def read_metrics(path: Path, size: int) -> Lines[MetricsLine]:
    """Return the last lines of a run's metrics.

    Args:
        path: its ``metrics.jsonl``; it need not exist.
        size: how many bytes are read at most.

    Raises:
        RecordError: it cannot be read.
    """
    return read_last_lines(path, MetricsLine, size)
