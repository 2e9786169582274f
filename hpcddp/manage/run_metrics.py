"""What a report keeps of a log of metrics: curves, extremes and durations, in memory that does not grow with the log.

Neighbouring lines are joined into pieces and stretches. As soon as there are too many, twice as many lines are joined.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, compress, filterfalse, pairwise
from pathlib import Path
from typing import Final, TypeVar

from hpcddp.manage.ranking import is_smaller_better
from hpcddp.run.metrics_reader import MetricsBlock, MetricsReader
from hpcddp.run.record import LATEST_TIME

_MOST_PIECES: Final = 2400
_MOST_STRETCHES: Final = 4096
_MOST_RATES: Final = 1 << 14
# What lies beyond is damage, and is not drawn.
_LARGEST: Final = 1e100
# Samples per second; a step that is slower is damage.
_SLOWEST: Final = 1e-6
# An evaluation, or a pause between steps, stays visible if it takes at least this part of the attempt until then.
_VISIBLE: Final = 0.001
# Numbers of a line that have no curve.
_NOT_DRAWN: Final = {"time", "epoch", "samples_seen", "val_samples", "eval_s", "format"}

NumberT = TypeVar("NumberT", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extreme:
    """A value of a metric and its step."""

    value: float
    step: int


@dataclass(slots=True, kw_only=True)
class Piece:
    """Neighbouring values of a metric in one attempt.

    Args:
        attempt_index: the index of the attempt among the attempts of the run.
        lines: how many values these are.
        steps: the sum of their steps.
        times: the sum of their times, in seconds since the epoch; not finite if one is not known.
        total: their sum.
    """

    attempt_index: int
    lines: int
    steps: float
    times: float
    total: float
    low: float
    high: float

    def join(self, later: Piece) -> None:
        """Add the values that follow."""
        self.lines += later.lines
        self.steps += later.steps
        self.times += later.times
        self.total += later.total
        self.low = min(self.low, later.low)
        self.high = max(self.high, later.high)


def joined_pieces(pieces: Sequence[Piece], lines: int) -> list[Piece]:
    """Return pieces of at most so many lines, if they are not longer already."""
    joined: list[Piece] = []
    for piece in pieces:
        if joined and joined[-1].attempt_index == piece.attempt_index and joined[-1].lines + piece.lines <= lines:
            joined[-1].join(piece)
        else:
            joined.append(piece)
    return joined


class Metric:
    """The values of a metric in a run.

    Args:
        name: its name, which says whether the smallest or the largest value is the best.
    """

    def __init__(self, name: str) -> None:
        self._best_of = min if is_smaller_better(name) else max
        self._piece_lines = 1
        self.pieces: list[Piece] = []
        """Its curve: the steps, times and values, without those that are too large to be drawn."""
        self.best: Extreme
        """The best value, the first of equal ones."""
        self.last: Extreme

    def add(self, attempt_index: int, steps: Sequence[int], times: Sequence[float], values: Sequence[float]) -> None:
        """Add values of an attempt, at least one; all are finite."""
        pieces = self._pieces_of(attempt_index, steps, times, values)
        self.last = Extreme(value=values[-1], step=steps[-1])
        best = self._best_of(value for piece in pieces for value in (piece.low, piece.high))
        if not hasattr(self, "best") or self._best_of(self.best.value, best) != self.best.value:
            self.best = Extreme(value=best, step=steps[values.index(best)])
        if any(piece.high >= _LARGEST or piece.low <= -_LARGEST for piece in pieces):
            are_drawn = [abs(value) < _LARGEST for value in values]
            drawn_steps = _rows(are_drawn, steps)
            drawn_times = _rows(are_drawn, times)
            drawn_values = _rows(are_drawn, values)
            pieces = self._pieces_of(attempt_index, drawn_steps, drawn_times, drawn_values)
        self.pieces += pieces
        while len(self.pieces) > _MOST_PIECES + attempt_index:
            self._piece_lines *= 2
            self.pieces = joined_pieces(self.pieces, self._piece_lines)

    def _pieces_of(
        self, attempt_index: int, steps: Sequence[int], times: Sequence[float], values: Sequence[float]
    ) -> list[Piece]:
        pieces = []
        for first in range(0, len(values), self._piece_lines):
            rows = slice(first, first + self._piece_lines)
            group = values[rows]
            piece = Piece(
                attempt_index=attempt_index,
                lines=len(group),
                steps=sum(steps[rows]),
                times=sum(times[rows]),
                total=sum(group),
                low=min(group),
                high=max(group),
            )
            pieces.append(piece)
        return pieces


@dataclass(slots=True, kw_only=True)
class Stretch:
    """Lines of metrics that follow each other in one attempt.

    Args:
        first_step: the step of the first line.
        lowest_step: the lowest step of a line.
        highest_step: the highest step of a line.
        began: when the step of the first line began, in seconds since the epoch; ``-inf`` if that is not known.
        ended: when the step of the last line ended; a line without a time has that of the line before.
        step_s: the durations of the steps together; 0 if they are not known.
        eval_s: the durations of the evaluations together.
    """

    lines: int
    first_step: int
    lowest_step: int
    highest_step: int
    began: float
    ended: float
    step_s: float
    eval_s: float

    def join(self, later: Stretch) -> None:
        """Add the lines that follow."""
        self.lines += later.lines
        self.lowest_step = min(self.lowest_step, later.lowest_step)
        self.highest_step = max(self.highest_step, later.highest_step)
        self.ended = later.ended
        self.step_s += later.step_s
        self.eval_s += later.eval_s

    def until(self, step: int) -> Stretch | None:
        """Return the part with the steps up to one; None if there is none. The steps in it are equally long."""
        if step < self.lowest_step:
            return None
        if step >= self.highest_step:
            return self
        share = (step - self.lowest_step + 1) / (self.highest_step - self.lowest_step + 1)
        return Stretch(
            lines=self.lines,
            first_step=self.first_step,
            lowest_step=self.lowest_step,
            highest_step=step,
            began=self.began,
            ended=self.began + share * (self.ended - self.began) if self.began > -math.inf else self.ended,
            step_s=share * self.step_s,
            eval_s=share * self.eval_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStart:
    """When an attempt began, in seconds since the epoch.

    Args:
        began: from when on lines of metrics are its own.
        trained: when its first step began; ``-inf`` if that is not known. The first line then has no duration, unless
            it records one.
    """

    began: float
    trained: float = -math.inf


class _StepClock:
    """Finds the duration of each step in a log, from its first line to its last."""

    def __init__(self, starts: Sequence[AttemptStart]) -> None:
        self._starts = list(reversed(starts))
        self._samples = 0.0
        self._time = -math.inf
        self._evaluated_s = 0.0

    def durations(
        self, times: Sequence[float], seen: Sequence[float], rates: Sequence[float], eval_s: Sequence[float]
    ) -> list[float]:
        """Return the duration of the step of each line, in seconds; 0 for an evaluation, and where it is not known.

        Args:
            times: when each step ended; NaN where that is not known.
            seen: the samples until then.
            rates: samples per second.
            eval_s: the duration of each evaluation.
        """
        most_seen = list(accumulate(seen, max, initial=self._samples))
        step_s = [
            (after - before) / rate if after > before and rate > _SLOWEST else 0.0
            for (before, after), rate in zip(pairwise(most_seen), rates, strict=True)
        ]
        is_complete = 0.0 not in step_s
        if not is_complete and any(map(_lacks_duration, step_s, times)):
            return self._durations_by_time(times, seen, rates, eval_s)
        self._samples = most_seen[-1]
        if is_complete:
            self._end_line(times[-1], 0.0)
            return step_s
        for time, evaluated_s in zip(times, eval_s, strict=True):
            self._end_line(time, evaluated_s)
        return step_s

    def _end_line(self, time: float, eval_s: float) -> None:
        if math.isnan(time):
            self._evaluated_s += eval_s
            return
        self._begin_attempts(time)
        self._time = time
        self._evaluated_s = 0.0

    def _begin_attempts(self, time: float) -> None:
        while self._starts and self._starts[-1].began <= time:
            trained = self._starts.pop().trained
            self._time = max(self._time, trained) if trained > -math.inf else -math.inf
            self._evaluated_s = 0.0

    def _durations_by_time(
        self, times: Sequence[float], seen: Sequence[float], rates: Sequence[float], eval_s: Sequence[float]
    ) -> list[float]:
        """Return the same, by the times of the lines where the samples do not tell."""
        step_s = [0.0] * len(times)
        for index, time in enumerate(times):
            if not math.isnan(time):
                self._begin_attempts(time)
                samples = seen[index] - self._samples
                if samples > 0 and rates[index] > _SLOWEST:
                    step_s[index] = samples / rates[index]
                elif self._time > -math.inf:
                    step_s[index] = max(0.0, time - self._time - self._evaluated_s)
                if not math.isnan(seen[index]):
                    self._samples = seen[index]
            self._end_line(time, eval_s[index])
        return step_s


@dataclass(kw_only=True)
class RunMetrics:
    """What a report keeps of the metrics of a run.

    Args:
        starts: the attempts of the run.
        lines: how many lines there are.
        last_step: the highest step.
        metrics: the numbers that have a curve, by name.
        rates: samples per second of the steps; of more than 16,384, a random choice.
        stretches: the lines of each attempt.
        damaged: how many lines are left out, because they are not lines of metrics.
    """

    starts: Sequence[AttemptStart] = ()
    lines: int = 0
    last_step: int = 0
    metrics: dict[str, Metric] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    stretches: list[list[Stretch]] = field(default_factory=list)
    damaged: int = 0

    def __post_init__(self) -> None:
        self._clock = _StepClock(self.starts)
        self._random = random.Random(0)  # noqa: S311  the same numbers for the same log
        self._rate_every = 1
        self._stretch_lines = 1
        self._time = -math.inf
        self.stretches = [[] for _ in self.starts] or [[]]
        # The index of the attempt that has written the last line.
        self._attempt_index = 0

    def add(self, block: MetricsBlock) -> None:
        """Add the lines that follow."""
        steps = block.steps
        self.lines += len(steps)
        self.last_step = max(self.last_step, *steps)
        missing = [math.nan] * len(steps)
        numbers = block.numbers
        rates = numbers.get("samples_per_s", missing)
        own_times = [time if 0 <= time < LATEST_TIME else math.nan for time in numbers.get("time", missing)]
        eval_s = [seconds if 0 <= seconds < LATEST_TIME else 0.0 for seconds in numbers.get("eval_s", missing)]
        step_s = self._clock.durations(own_times, numbers.get("samples_seen", missing), rates, eval_s)
        # Clocks of the hosts of two attempts differ a little.
        times = list(accumulate(own_times, max, initial=self._time))[1:]
        self._time = times[-1]
        parts = self._rows_by_attempt(times)
        self._attempt_index, _ = parts[-1]
        for attempt_index, rows in parts:
            self._add_stretches(attempt_index, steps[rows], times[rows], step_s[rows], eval_s[rows])
        for name, values in numbers.items():
            if name not in _NOT_DRAWN:
                for attempt_index, rows in parts:
                    self._add_values(name, attempt_index, steps[rows], times[rows], values[rows])
        self._add_rates(rates)

    def _rows_by_attempt(self, times: Sequence[float]) -> list[tuple[int, slice]]:
        """Return which lines each attempt has written: its index, and its rows.

        Args:
            times: when each step ended, in ascending order.
        """
        later_starts = self.starts[self._attempt_index + 1 :]
        # The clock of a later attempt may be behind.
        first_rows = accumulate((bisect_left(times, start.began) for start in later_starts), max)
        edges = [0, *(row for row in first_rows if row < len(times)), len(times)]
        parts = []
        for index, (first, end) in enumerate(pairwise(edges), start=self._attempt_index):
            if first < end:
                parts.append((index, slice(first, end)))
        return parts

    def _add_values(
        self, name: str, attempt_index: int, steps: Sequence[int], times: Sequence[float], values: Sequence[float]
    ) -> None:
        if math.isnan(sum(values)):
            has_value = [not is_missing for is_missing in map(math.isnan, values)]
            steps = _rows(has_value, steps)
            times = _rows(has_value, times)
            values = _rows(has_value, values)
        if values:
            if name not in self.metrics:
                self.metrics[name] = Metric(name)
            self.metrics[name].add(attempt_index, steps, times, values)

    def _add_rates(self, rates: Sequence[float]) -> None:
        # A random choice: steps may be slow by turns.
        count, rest = divmod(len(rates), self._rate_every)
        count += self._random.randrange(self._rate_every) < rest
        kept = rates if self._rate_every == 1 else self._random.sample(rates, count)
        self.rates.extend(filterfalse(math.isnan, kept))
        if len(self.rates) > _MOST_RATES:
            self._rate_every *= 2
            self.rates = self._random.sample(self.rates, len(self.rates) // 2)

    def _add_stretches(
        self,
        attempt_index: int,
        steps: Sequence[int],
        times: Sequence[float],
        step_s: Sequence[float],
        eval_s: Sequence[float],
    ) -> None:
        visible_s = self._visible_s(attempt_index, times[-1])
        stretches = self.stretches[attempt_index]
        for first in range(0, len(steps), self._stretch_lines):
            rows = slice(first, first + self._stretch_lines)
            stretch = _stretch_of(steps[rows], times[rows], step_s[rows], eval_s[rows])
            pauses_s = stretch.ended - stretch.began - stretch.step_s
            hides_pause = stretch.eval_s > visible_s or pauses_s > visible_s
            if not hides_pause:
                _append(stretches, stretch, self._stretch_lines, visible_s)
                continue
            for line in range(first, first + stretch.lines):
                row = slice(line, line + 1)
                line_stretch = _stretch_of(steps[row], times[row], step_s[row], eval_s[row])
                _append(stretches, line_stretch, self._stretch_lines, visible_s)
        while sum(map(len, self.stretches)) > _MOST_STRETCHES * (1 + attempt_index):
            self._stretch_lines *= 2
            for index in range(attempt_index + 1):
                self.stretches[index] = self._joined_stretches(index)

    def _joined_stretches(self, attempt_index: int) -> list[Stretch]:
        stretches = self.stretches[attempt_index]
        visible_s = self._visible_s(attempt_index, stretches[-1].ended if stretches else 0.0)
        if self._stretch_lines > self.lines:
            # More than fits into the time: the durations are damaged.
            visible_s = math.inf
        joined: list[Stretch] = []
        for stretch in stretches:
            _append(joined, stretch, self._stretch_lines, visible_s)
        return joined

    def _visible_s(self, attempt_index: int, time: float) -> float:
        return max(0.0, _VISIBLE * (time - self.starts[attempt_index].began)) if self.starts else 0.0


def _stretch_of(
    steps: Sequence[int], times: Sequence[float], step_s: Sequence[float], eval_s: Sequence[float]
) -> Stretch:
    """Return all these lines, at least one, as one stretch."""
    return Stretch(
        lines=len(steps),
        first_step=steps[0],
        lowest_step=min(steps),
        highest_step=max(steps),
        began=times[0] - step_s[0],
        ended=times[-1],
        step_s=sum(step_s),
        eval_s=sum(eval_s),
    )


def _append(stretches: list[Stretch], stretch: Stretch, lines: int, visible_s: float) -> None:
    """Append a stretch, or join it with the last one, if that then has at most so many lines and hides nothing."""
    if not stretches or stretches[-1].lines + stretch.lines > lines:
        stretches.append(stretch)
        return
    last = stretches[-1]
    longest_pause_s = max(last.eval_s, stretch.eval_s, stretch.began - last.ended)
    if longest_pause_s > visible_s:
        stretches.append(stretch)
    else:
        last.join(stretch)


def _lacks_duration(step_s: float, time: float) -> bool:
    return not step_s and not math.isnan(time)


def _rows(are_kept: Sequence[bool], values: Sequence[NumberT]) -> list[NumberT]:
    return list(compress(values, are_kept))


def read_run_metrics(path: Path, starts: Sequence[AttemptStart] = ()) -> RunMetrics:
    """Return what a report keeps of a log of metrics.

    Args:
        path: the run's ``metrics.jsonl``; it need not exist.
        starts: the attempts of the run, in their order.

    Raises:
        RecordError: it cannot be read.
    """
    reader = MetricsReader(path)
    metrics = RunMetrics(starts=starts)
    for block in reader:
        metrics.add(block)
    metrics.damaged = reader.damaged
    return metrics
