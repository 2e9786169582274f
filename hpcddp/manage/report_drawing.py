"""The drawings of a report as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Final

from markupsafe import Markup

from hpcddp.manage.attempt_times import AttemptTimes, Phase
from hpcddp.manage.run_metrics import Point

_ATTEMPTS_DRAWN: Final = 40
_MARKS: Final = 200
_MARKED_POINTS: Final = 40
_TICKS: Final = 6
_UNITS: Final = ((2 * 86400, 86400, "days"), (2 * 3600, 3600, "hours"), (120, 60, "minutes"))
_LOGARITHMIC_FROM: Final = 1000
# A logarithmic axis cannot reach down to the smallest numbers of the machine.
_SMALLEST_LOGARITHMIC: Final = 1e-100
# Values that differ by less are drawn as one.
_SAME: Final = 1e-9
# Whole numbers below are written with all their digits.
_LARGEST_WHOLE: Final = 1e7
# Where the axes of a chart are, in pixels.
_LEFT: Final = 58
_RIGHT: Final = 455
_TOP: Final = 10
_BOTTOM: Final = 188
_CHART: Final = (480, 210)
_TIMELINE_WIDTH: Final = 860
_ROW: Final = 28


def time_unit(seconds: float) -> tuple[int, str]:
    """Return the unit for the axis of a duration: its seconds and its name."""
    for shortest, unit_s, name in _UNITS:
        if seconds >= shortest:
            return unit_s, name
    return 1, "seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A curve of a chart.

    Args:
        color: the number of its colour.
        parts: what a line connects: points, each with its place on the horizontal axis.
    """

    color: int
    parts: Sequence[Sequence[tuple[float, Point]]]

    @classmethod
    def over_steps(cls, points: Sequence[Point], color: int) -> Curve:
        """Return the curve of a metric over steps."""
        return cls(color=color, parts=[[(float(point.step), point) for point in points]])

    @classmethod
    def over_time(cls, points: Sequence[Point], color: int, *, began: float, unit_s: float) -> Curve:
        """Return the curve of a metric over the wall time; it is interrupted between attempts.

        Args:
            began: when the run began, in seconds since the epoch.
            unit_s: the unit of the wall time, in seconds.
        """
        parts = []
        for _, points_of_attempt in groupby(points, key=lambda point: point.attempt_index):
            part = [((point.time - began) / unit_s, point) for point in points_of_attempt]
            parts.append([(x, point) for x, point in part if math.isfinite(x)])
        return cls(color=color, parts=parts)

    def points(self) -> list[tuple[float, Point]]:
        """Return all points."""
        return list(chain.from_iterable(self.parts))


class _Axis:
    """An axis: the range of values that it shows, and where they are.

    Args:
        low: the smallest value.
        high: the largest value.
        first: where the smallest value is, in pixels.
        last: where the largest value is, in pixels.
    """

    def __init__(self, low: float, high: float, first: float, last: float, *, is_logarithmic: bool = False) -> None:
        self._is_logarithmic = is_logarithmic
        self._low = self._scaled(low)
        self._high = self._scaled(high)
        self._first = first
        self._last = last

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self._is_logarithmic else value

    def place(self, value: float) -> str:
        """Return where a value is, in pixels, as a text."""
        part = (self._scaled(value) - self._low) / (self._high - self._low)
        return f"{self._first + part * (self._last - self._first):.1f}"

    def ticks(self) -> Iterator[float]:
        """Yield the round values at which the axis has a label."""
        spacing = (self._high - self._low) / _TICKS
        power = 10.0 ** math.floor(math.log10(spacing))
        step = next((factor * power for factor in (1, 2, 5) if factor * power >= spacing), 10 * power)
        if self._is_logarithmic:
            step = math.ceil(step)
        for number in range(math.ceil(self._low / step), math.floor(self._high / step) + 1):
            yield 10.0 ** (number * step) if self._is_logarithmic else number * step


def _tick_text(value: float) -> str:
    if value == round(value) and abs(value) < _LARGEST_WHOLE:
        return f"{value:.0f}"
    return f"{value:.6g}"


def _value_axis(low: float, high: float, *, is_logarithmic: bool) -> _Axis:
    """Return the vertical axis of a chart, with a margin around its values."""
    if is_logarithmic:
        margin = (high / low) ** 0.04
        return _Axis(low / margin, high * margin, _BOTTOM, _TOP, is_logarithmic=True)
    size = max(abs(low), abs(high))
    margin = 0.04 * (high - low)
    if high - low <= _SAME * size or size < _SMALLEST_LOGARITHMIC:
        margin = 0.1 * size if size > _SMALLEST_LOGARITHMIC else 1.0
    return _Axis(low - margin, high + margin, _BOTTOM, _TOP)


def spans_powers_of_ten(points: Sequence[Point]) -> bool:
    """Return whether all values are positive, and span more than three powers of ten."""
    lowest = min((point.low for point in points), default=0.0)
    highest = max((point.high for point in points), default=0.0)
    return lowest > _SMALLEST_LOGARITHMIC and highest > _LOGARITHMIC_FROM * lowest


def chart(curves: Sequence[Curve], marks: Sequence[float], *, width: float, is_logarithmic: bool) -> Markup:
    """Return the drawing of curves, with a line at each mark; empty if no curve has points.

    Args:
        curves: around one that is alone, a band reaches from the smallest to the largest values.
        marks: places on the horizontal axis.
        width: the largest value on the horizontal axis, at least.
    """
    points = list(chain.from_iterable(curve.points() for curve in curves))
    if not points:
        return Markup()
    across = _Axis(0.0, max(width, *(x for x, _ in points)) or 1.0, _LEFT, _RIGHT)
    lowest = min(point.low for _, point in points)
    highest = max(point.high for _, point in points)
    upwards = _value_axis(lowest, highest, is_logarithmic=is_logarithmic)
    parts = [*_horizontal_labels(across, _BOTTOM)]
    for value in upwards.ticks():
        y = upwards.place(value)
        parts.append(f'<path d="M{_LEFT} {y}H{_RIGHT}" stroke="var(--grid)"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y}" dy="3.5" text-anchor="end">{_tick_text(value)}</text>')
    mark_places = map(across.place, marks[:_MARKS])
    parts += (f'<path d="M{x} {_TOP}V{_BOTTOM}" stroke="var(--ink)" stroke-dasharray="1 3"/>' for x in mark_places)
    for curve in curves:
        parts += _curve_parts(curve, across, upwards, has_band=len(curves) == 1)
    return _svg(parts, *_CHART)


def _curve_parts(curve: Curve, across: _Axis, upwards: _Axis, *, has_band: bool) -> Iterator[str]:
    """Yield the band and the line of each part of a curve, and a dot at each point of a short curve."""
    paint = f"var(--c{curve.color})"
    has_dots = len(curve.points()) <= _MARKED_POINTS
    for part in filter(None, curve.parts):
        line = []
        above = []
        below = []
        for x, point in part:
            place = across.place(x)
            line.append(f"{place} {upwards.place(point.mean)}")
            above.append(f"{place} {upwards.place(point.high)}")
            below.append(f"{place} {upwards.place(point.low)}")
        if has_band and above != below:
            below.reverse()
            yield f'<path d="M{"L".join(above + below)}Z" fill="{paint}" opacity=".22"/>'
        yield f'<path d="M{"L".join(line)}" fill="none" stroke="{paint}" stroke-width="1.5"/>'
        if has_dots:
            for place in line:
                yield f'<path d="M{place}h0" stroke="{paint}" stroke-width="4" stroke-linecap="round"/>'


def _horizontal_labels(across: _Axis, bottom: float) -> Iterator[str]:
    for value in across.ticks():
        x = across.place(value)
        yield f'<path d="M{x} {_TOP}V{bottom}" stroke="var(--grid)"/>'
        yield f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{_tick_text(value)}</text>'


def timeline(attempts: Sequence[AttemptTimes]) -> Markup:
    """Return the drawing of the newest attempts of a run, a row for each; empty without one."""
    attempts = attempts[-_ATTEMPTS_DRAWN:]
    if not attempts:
        return Markup()
    began = min(span.began for attempt in attempts for span in attempt.spans)
    ended = max(attempt.ended for attempt in attempts)
    unit_s, unit = time_unit(ended - began)
    left = 90
    right = _TIMELINE_WIDTH - 20
    bottom = _TOP + _ROW * len(attempts)
    across = _Axis(0.0, max((ended - began) / unit_s, _SAME), left, right)
    parts = [*_horizontal_labels(across, bottom)]
    parts.append(f'<text x="{(left + right) / 2}" y="{bottom + 32}" text-anchor="middle">{unit}</text>')
    for row, attempt in enumerate(attempts):
        top = _TOP + _ROW * row + 4
        parts.append(f'<text x="{left - 8}" y="{top + 14}" text-anchor="end">attempt {attempt.number}</text>')
        for span in attempt.spans:
            if span.ended > span.began:
                x = across.place((span.began - began) / unit_s)
                end = across.place((span.ended - began) / unit_s)
                color = list(Phase).index(span.phase)
                parts.append(f'<path d="M{x} {top}H{end}v20H{x}Z" fill="var(--p{color})"/>')
    return _svg(parts, _TIMELINE_WIDTH, bottom + 40)


def _svg(parts: Sequence[str], width: int, height: int) -> Markup:
    """Return a drawing for a page; nothing in it comes from a run but numbers."""
    head = f'<svg role="img" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">'
    return Markup(f"{head}{''.join(parts)}</svg>")  # noqa: S704  drawn here
