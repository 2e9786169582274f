"""Protocol of a tracker, and the values that are passed to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from hpcddp.jobfile.sections import Trackers
from hpcddp.run.directory import RunDirectory
from hpcddp.train.tracking.memory import Memory


class Ending(Enum):
    """How an attempt ended, with its exit code."""

    FINISHED = 0
    FAILED = 1
    STOPPED = 75
    """A later attempt may continue the run."""
    CANCELLED = 130


@dataclass(frozen=True, slots=True)
class Point:
    """One record of ``metrics.jsonl``.

    Args:
        step: optimizer steps done.
        time: seconds since the epoch.
        values: finite numbers by name, such as ``train/loss`` and ``val/accuracy``.
        evaluated: whether the record is an evaluation.
    """

    step: int
    time: float
    values: Mapping[str, float]
    evaluated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The run that a tracker shows.

    Args:
        attempt: the current attempt.
        job: name of the job.
        settings: ``trackers`` of the job.
        config: the resolved job without possible secrets.
        memory: state of the tracker from earlier attempts.
    """

    run: RunDirectory
    attempt: int
    job: str
    settings: Trackers
    config: Mapping[str, Any]
    memory: Memory


class Tracker(Protocol):
    """A service that shows curves. Its methods may raise any exception without effect on the training."""

    def write(self, points: Sequence[Point]) -> None:
        """Show points, in the order of their steps; return when they are sent."""

    def close(self, ending: Ending) -> None:
        """Report how the attempt ended, and close the tracker."""
