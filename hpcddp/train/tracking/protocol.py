"""What a tracker is, and what it is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from hpcddp.run.directory import RunDirectory
from hpcddp.spec.job import Trackers
from hpcddp.train.tracking.memory import Memory


class Ending(Enum):
    """How an attempt ended.

    Each with the exit code that says so.
    """

    FINISHED = 0
    FAILED = 1
    STOPPED = 75
    """It may go on under the same run id."""
    CANCELLED = 130


@dataclass(frozen=True, slots=True)
class Point:
    """One record of ``metrics.jsonl``.

    Args:
        step: optimizer steps done.
        time: seconds since the epoch.
        values: finite numbers by name: ``train/loss``, ``val/accuracy``.
        evaluated: whether it is an evaluation.
    """

    step: int
    time: float
    values: Mapping[str, float]
    evaluated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What a tracker shows.

    Args:
        run: the run.
        attempt: the attempt that shows it now.
        job: the job's name.
        settings: the names that the user chose.
        config: the resolved job, without what may be secret.
        memory: what the tracker knows of the run from earlier attempts.
    """

    run: RunDirectory
    attempt: int
    job: str
    settings: Trackers
    config: Mapping[str, Any]
    memory: Memory


class Tracker(Protocol):
    """Something that shows curves. It may raise whatever it likes; the training does not notice."""

    def write(self, points: Sequence[Point]) -> None:
        """Show a block of points, in the order of their steps; returns when they are handed over."""

    def close(self, ending: Ending) -> None:
        """Say how the attempt has ended, and let go."""
