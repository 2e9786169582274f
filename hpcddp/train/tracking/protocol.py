"""Protocol of a tracker, what is passed to it, and its record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from hpcddp.jobfile.sections import Trackers
from hpcddp.run.directory import RunDirectory
from hpcddp.run.record import RecordError, write_record
from hpcddp.run.trackers import TrackerPosition, read_position


class TrackerState:
    """The tracker's own id of the run, and the last records that were sent to it.

    Args:
        path: the file; need not exist.

    Attributes:
        run_id: what the tracker calls the run; None before it has said so.
        step: the last step that was sent; -1 before the first.
        evaluated_step: the step of the last evaluation that was sent; -1 before the first.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.load()

    def load(self) -> None:
        """Take the state that was saved last."""
        saved = TrackerPosition()
        # A tracker that begins anew is better than a training that does not begin.
        with suppress(RecordError):
            saved = read_position(self._path)
        self.run_id: str | None = saved.run_id
        self.step: int = saved.step
        self.evaluated_step: int = saved.evaluated_step
        self._last: tuple[int, bool] | None = None

    def set_run_id(self, run_id: str) -> None:
        """Save what the tracker calls the run."""
        self.run_id = run_id
        self.save()

    def mark_if_new(self, step: int, *, evaluated: bool) -> bool:
        """Return whether a record of a step, or of its evaluation, is new, and mark it as sent until ``load``.

        Records of one step may follow each other. A step that comes back later was computed twice.
        """
        if (step, evaluated) == self._last:
            return True
        if step <= (self.evaluated_step if evaluated else self.step):
            return False
        self.mark_sent(step, evaluated=evaluated)
        self._last = (step, evaluated)
        return True

    def mark_sent(self, step: int, *, evaluated: bool) -> None:
        """Mark a record as sent."""
        if evaluated:
            self.evaluated_step = max(step, self.evaluated_step)
        else:
            self.step = max(step, self.step)

    def rewind(self, step: int) -> None:
        """Mark what came after ``step`` as not sent: the tracker does not have it, or drops it."""
        self.step, self.evaluated_step = min(self.step, step), min(self.evaluated_step, step)

    def save(self) -> None:
        """Write the state to the file."""
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        position = TrackerPosition(run_id=self.run_id, step=self.step, evaluated_step=self.evaluated_step)
        write_record(self._path, position)


class AttemptEnding(Enum):
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
        appended: whether code of the user's own has written the record in this attempt, so that its step may go back:
            earlier records from that step on do not count.
    """

    step: int
    time: float
    values: Mapping[str, float]
    evaluated: bool
    appended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerInputs:
    """What a tracker gets when it starts.

    Args:
        attempt: the attempt that begins; it owns the run.
        settings: ``trackers`` of the job.
        config: the resolved job without possible secrets.
        state: what earlier attempts have sent.
        first_step: optimizer steps done if ``metrics.jsonl`` has no later records; None if it may have.
        appended_from: the bytes of ``metrics.jsonl`` before the attempt, where code of the user's own writes it; None
            in the built-in training.
    """

    run: RunDirectory
    attempt: int
    settings: Trackers
    config: Mapping[str, Any]
    state: TrackerState
    first_step: int | None
    appended_from: int | None

    @property
    def project(self) -> str:
        """The project of the tracker: the one that the job names, else the job's name."""
        return self.settings.project or str(self.config["name"])


class Tracker(Protocol):
    """A service that shows curves. What its methods raise does not affect the training."""

    def write(self, points: Sequence[Point]) -> None:
        """Show points, in the order of their steps; return when they are sent."""

    def close(self, ending: AttemptEnding) -> None:
        """Report how the attempt ended, and close the tracker."""
