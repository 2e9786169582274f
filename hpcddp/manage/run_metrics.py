"""The metrics of a run for a report: the lines that were read of its log, and their curves."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Final

from hpcddp.manage.ranking import is_smaller_better
from hpcddp.run.metrics import ThinnedMetrics, finite_number
from hpcddp.run.record import LATEST_TIME

# What is beyond is damage, and is not drawn.
_LARGEST: Final = 1e100
# Numbers of a line that have no curve.
_NOT_DRAWN: Final = {"step", "time", "epoch", "samples_seen", "val_samples", "eval_s", "format"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Extreme:
    """A value of a metric and its step."""

    value: float
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Neighbouring values of a metric in one attempt, drawn as one point of its curve.

    Args:
        attempt_index: the index of the attempt among the attempts of the run.
        step: the step in their middle.
        time: when that was, in seconds since the epoch; not finite if that is not known.
        mean: the mean of the values.
        low: the smallest of them.
        high: the largest of them.
    """

    attempt_index: int
    step: int
    time: float
    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptLog:
    """The lines of one attempt.

    Args:
        steps: the step of each line.
        times: when it was written, in seconds since the epoch, in ascending order; a line without a time has that of
            the line before, or ``-inf``.
    """

    steps: Sequence[int]
    times: Sequence[float]

    @property
    def first_time(self) -> float | None:
        """The time of the first line that has one; None without one."""
        return next((time for time in self.times if time > -math.inf), None)

    @property
    def last_time(self) -> float | None:
        """The time of the last line; None if no line has one."""
        return None if self.first_time is None else self.times[-1]

    def until(self, step: int | None) -> AttemptLog:
        """Return the lines up to the last one with at most this step; all of them for None."""
        if step is None:
            return self
        length = len(self.steps)
        while length and self.steps[length - 1] > step:
            length -= 1
        return AttemptLog(steps=self.steps[:length], times=self.times[:length])


class RunMetrics:
    """The lines of a run that were read.

    Attributes:
        steps: the step of each line.
        times: when each was written, as ``AttemptLog`` has it.
        damaged: how many lines are left out, because they are not lines of metrics.
    """

    def __init__(self) -> None:
        self.steps = array("q")
        self.times = array("d")
        self.damaged = 0
        # By name: the rows in which a metric has a value, and the values.
        self._rows: dict[str, array[int]] = {}
        self._values: dict[str, array[float]] = {}

    @property
    def names(self) -> list[str]:
        """The names of all metrics, in alphabetical order."""
        return sorted(self._values)

    @property
    def last_step(self) -> int:
        """The highest step; 0 without one."""
        return max(self.steps, default=0)

    def add(self, document: Mapping[str, Any]) -> None:
        """Add the line that follows."""
        row = len(self.steps)
        self.steps.append(document["step"])
        time = finite_number(document.get("time"))
        previous_time = self.times[-1] if self.times else -math.inf
        if time is None or not 0 <= time < LATEST_TIME:
            time = previous_time
        # The clocks of the hosts of two attempts differ a little.
        self.times.append(max(time, previous_time))
        for name, value in document.items():
            if name in _NOT_DRAWN:
                continue
            number = finite_number(value)
            if number is not None:
                if name not in self._rows:
                    self._rows[name] = array("q")
                    self._values[name] = array("d")
                self._rows[name].append(row)
                self._values[name].append(number)

    def values(self, name: str) -> Sequence[float]:
        """Return the values of a metric in their order; none of an unknown metric."""
        return self._values.get(name, ())

    def last(self, name: str) -> Extreme | None:
        """Return the last value of a metric; None of an unknown metric."""
        if name not in self._values:
            return None
        return Extreme(value=self._values[name][-1], step=self.steps[self._rows[name][-1]])

    def best(self, name: str) -> Extreme | None:
        """Return the best value of a metric, the first of equal ones: the smallest of a loss or an error."""
        if name not in self._values:
            return None
        values = self._values[name]
        best = min(values) if is_smaller_better(name) else max(values)
        return Extreme(value=best, step=self.steps[self._rows[name][values.index(best)]])

    def logs(self, began: Sequence[float]) -> list[AttemptLog]:
        """Return the lines of each attempt.

        Args:
            began: when each attempt began, in seconds since the epoch.
        """
        edges = self._edges(began)
        return [AttemptLog(steps=self.steps[first:end], times=self.times[first:end]) for first, end in pairwise(edges)]

    def _edges(self, began: Sequence[float]) -> list[int]:
        """Return the row at which each attempt begins, and the end of the last one."""
        # The clock of a later attempt may be behind.
        later_rows = accumulate((bisect_left(self.times, time) for time in began[1:]), max)
        return [0, *later_rows, len(self.times)]

    def points(self, name: str, began: Sequence[float], most: int) -> list[Point]:
        """Return the curve of a metric.

        Args:
            began: when each attempt began, in seconds since the epoch.
            most: how many points the curve has, about.
        """
        rows = self._rows.get(name, array("q"))
        values = self._values.get(name, array("d"))
        size = math.ceil(len(values) / most)
        edges = [bisect_left(rows, row) for row in self._edges(began)]
        points = []
        for attempt_index, (first, end) in enumerate(pairwise(edges)):
            for place in range(first, end, max(1, size)):
                group = values[place : min(place + size, end)]
                low = min(group)
                high = max(group)
                row = rows[place + len(group) // 2]
                if low > -_LARGEST and high < _LARGEST:
                    point = Point(
                        attempt_index=attempt_index,
                        step=self.steps[row],
                        time=self.times[row],
                        mean=sum(group) / len(group),
                        low=low,
                        high=high,
                    )
                    points.append(point)
        return points


def read_run_metrics(path: Path) -> RunMetrics:
    """Return the metrics of a run.

    Args:
        path: the run's ``metrics.jsonl``; it need not exist.

    Raises:
        RecordError: it cannot be read.
    """
    reader = ThinnedMetrics(path)
    metrics = RunMetrics()
    for document in reader:
        metrics.add(document)
    metrics.damaged = reader.damaged
    return metrics
