"""The page of a report: one HTML file without scripts, with its curves as SVG."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from itertools import chain, groupby
from typing import Any, Final

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from hpcddp.errors import printable
from hpcddp.manage.attempt_times import Phase
from hpcddp.manage.first_error import FirstError, shortened
from hpcddp.manage.format import NOTHING, duration_text, number_text, one_line, step_text
from hpcddp.manage.report import RunReport
from hpcddp.manage.run_metrics import Point
from hpcddp.version import __version__

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


def time_unit(seconds: float) -> tuple[int, str]:
    """Return the unit for the axis of a duration: its seconds and its name."""
    for shortest, unit_s, name in _UNITS:
        if seconds >= shortest:
            return unit_s, name
    return 1, "seconds"


Curve = list[list[tuple[float, Point]]]
"""The parts of a curve, each with the points that a line connects, and their places on the horizontal axis."""


def _curve_over_time(points: Sequence[Point], *, began: float, unit_s: float) -> Curve:
    """Return the curve of a metric over the wall time; it is interrupted between attempts.

    Args:
        began: when the run began, in seconds since the epoch.
        unit_s: the unit of the wall time, in seconds.
    """
    curve = []
    for _, points_of_attempt in groupby(points, key=lambda point: point.attempt_index):
        part = [((point.time - began) / unit_s, point) for point in points_of_attempt]
        curve.append([(x, point) for x, point in part if math.isfinite(x)])
    return curve


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
        curves: each has its own colour; a single one has a band from the smallest to the largest values.
        marks: places on the horizontal axis.
        width: the largest value on the horizontal axis, at least.
    """
    points = list(chain.from_iterable(chain.from_iterable(curves)))
    if not points:
        return Markup()
    across = _Axis(0.0, max(width, *(x for x, _ in points)) or 1.0, _LEFT, _RIGHT)
    lowest = min(point.low for _, point in points)
    highest = max(point.high for _, point in points)
    upwards = _value_axis(lowest, highest, is_logarithmic=is_logarithmic)
    parts = []
    for value in across.ticks():
        x = across.place(value)
        parts.append(f'<path d="M{x} {_TOP}V{_BOTTOM}" stroke="var(--grid)"/>')
        parts.append(f'<text x="{x}" y="{_BOTTOM + 16}" text-anchor="middle">{_tick_text(value)}</text>')
    for value in upwards.ticks():
        y = upwards.place(value)
        parts.append(f'<path d="M{_LEFT} {y}H{_RIGHT}" stroke="var(--grid)"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y}" dy="3.5" text-anchor="end">{_tick_text(value)}</text>')
    mark_places = map(across.place, marks[:_MARKS])
    parts += (f'<path d="M{x} {_TOP}V{_BOTTOM}" stroke="var(--ink)" stroke-dasharray="1 3"/>' for x in mark_places)
    for color, curve in enumerate(curves):
        parts += _curve_parts(curve, f"var(--c{color})", across, upwards, has_band=len(curves) == 1)
    head = '<svg role="img" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 480 210">'
    # Nothing in it comes from a run but numbers.
    return Markup(f"{head}{''.join(parts)}</svg>")  # noqa: S704  drawn here


def _curve_parts(curve: Curve, paint: str, across: _Axis, upwards: _Axis, *, has_band: bool) -> Iterator[str]:
    """Yield the band and the line of each part of a curve, and a dot at each point of a short curve."""
    has_dots = sum(map(len, curve)) <= _MARKED_POINTS
    for part in filter(None, curve):
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


_RUNS_DRAWN: Final = 10
_RUNS_DETAILED: Final = 20
_CHARTS: Final = 14
# Points of all curves of a page together, and of one.
_POINTS: Final = 20_000
_MOST_POINTS: Final = 600
_FEWEST_POINTS: Final = 40
# Characters of diffs, job files and packages in a page, and of one of them.
_TEXT_CHARACTERS: Final = 300_000
_LONGEST_TEXT: Final = 100_000
_LOG_LINES: Final = 60
_LONGEST_LINE: Final = 400
_FIRST_CHARTS: Final = ("loss", "val_loss", "val_accuracy", "val_top5")
_LAST_CHARTS: Final = ("samples_per_s", "lr")
_WHOLE_RATES_FROM: Final = 100
# A time that is later is damage (the year 5138).
_LATEST: Final = 1e11
PHASES: Final[Mapping[Phase, str]] = {
    Phase.QUEUE: "queue",
    Phase.START_UP: "start-up",
    Phase.TRAINING: "training that counts",
    Phase.LOST: "lost steps",
    Phase.EVALUATION: "evaluation",
    Phase.SAVE: "waiting for saves",
    Phase.STOP: "stop",
    Phase.PROGRAM: "program without steps",
    Phase.OTHER: "other",
}


def page(
    order: Sequence[RunReport], *, metric: str | None = None, title: str, now: float, is_sweep: bool = False
) -> str:
    """Return the page about runs.

    Args:
        order: the runs, at least one, the best first.
        metric: the metric by which they are ranked; None if they have none.
        now: seconds since the epoch.
        is_sweep: whether the runs are the elements of a sweep.
    """
    is_single = len(order) == 1
    detailed = order[:_RUNS_DETAILED]
    with_curves = [report for report in order if report.measured.steps]
    drawn = with_curves[:_RUNS_DRAWN]
    texts = _Texts()
    return _template().render(
        title=title,
        made=_moment(now),
        version=__version__,
        runs=[_run_values(report, texts) for report in detailed],
        left_out=len(order) - len(detailed),
        is_single=is_single,
        is_sweep=is_sweep,
        ranking=[] if is_single else order,
        metric=metric,
        Phase=Phase,
        phase_names=PHASES,
        drawn=drawn,
        left_undrawn=len(with_curves) - len(drawn),
        charts=list(_charts(drawn)),
    )


def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(
        {
            "duration": duration_text,
            "label": _label,
            "color": lambda phase: f"--p{list(Phase).index(phase)}",
            "clean": _clean,
            "moment": _moment,
            "number": number_text,
            "rate": _rate,
            "part_of_a_step": _part_of_a_step,
        }
    )
    return environment.from_string(files("hpcddp.manage").joinpath("report.html.j2").read_text(encoding="utf-8"))


def _label(report: RunReport) -> str:
    if report.values:
        return _clean(f"{report.run.run_id}: {report.values_text}")
    return _clean(f"{report.run.name}/{report.run.run_id}")


def _clean(text: object) -> str:
    return one_line(str(text))


def _moment(seconds: float | None) -> str:
    if seconds is None or not 0 <= seconds < _LATEST:
        return NOTHING
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _rate(value: float | None) -> str:
    is_small = value is not None and value < _WHOLE_RATES_FROM
    return number_text(value, ".3g" if is_small else ",.0f")


def _part_of_a_step(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


class _Texts:
    """Cuts the long texts of a page, so that it stays small."""

    def __init__(self) -> None:
        self._characters_left = _TEXT_CHARACTERS
        self._taken: set[str] = set()

    def take(self, text: str) -> str:
        """Return the beginning of a text, without control characters; empty for a text that is on the page already."""
        if text in self._taken:
            return ""
        self._taken.add(text)
        beginning = printable(text[: min(_LONGEST_TEXT, self._characters_left)])
        self._characters_left -= len(beginning)
        return beginning


def _run_values(report: RunReport, texts: _Texts) -> dict[str, Any]:
    """Return what the template shows of one run."""
    from hpcddp.jobfile.write import dump_job

    goodput = report.goodput
    seconds = goodput.seconds
    phases = [phase for phase in seconds if phase is not Phase.QUEUE]
    phases.sort(key=lambda phase: -seconds[phase])
    sources = []
    for source in report.sources:
        packages = ", ".join(f"{name} {version}" for name, version in source.packages.items())
        sources.append({"source": source, "diff": texts.take(source.diff), "packages": packages})
    return {
        "report": report,
        "steps": step_text(report.status.step, report.status.files.total_steps),
        "metrics": _in_order_of_page(report.metrics),
        "is_running": any(attempt.is_running for attempt in report.attempts),
        "wall_s": _wall_s(report),
        "goodput": goodput,
        "shares": {phase: goodput.share(phase) for phase in phases},
        "hours": goodput.device_hours,
        "longest_s": max((sum(attempt.seconds.values()) for attempt in report.attempts), default=0.0),
        "error_text": _error_text(report.error),
        "sources": sources,
        "job_file": "" if report.spec is None else texts.take(dump_job(report.spec, environment_values=False)),
    }


def _error_text(error: FirstError | None) -> str:
    """Return the end of a traceback, or of a log; empty without an error."""
    if error is None:
        return ""
    lines = shortened(error.text) if error.is_traceback else error.text
    shown = [line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]} ..." for line in lines[-_LOG_LINES:]]
    return printable("\n".join(shown))


def _in_order_of_page(names: Sequence[str]) -> list[str]:
    """Return the names of metrics in the order of a page."""
    first = [name for name in _FIRST_CHARTS if name in names]
    return [*first, *sorted(name for name in names if name not in first)]


def _charts(reports: Sequence[RunReport]) -> Iterator[dict[str, Any]]:
    """Yield a chart for each metric, over steps and over wall time; the first run has the first colour."""
    names = _names_of_charts(reports)
    fitting_points = _POINTS // max(1, 4 * len(names) * len(reports))
    points_of_curve = max(_FEWEST_POINTS, min(_MOST_POINTS, fitting_points))
    longest_s = max((_wall_s(report) or 0.0 for report in reports), default=0.0)
    unit_s, unit = time_unit(longest_s)
    last_step = max((report.measured.last_step for report in reports), default=0)
    step_marks: list[float] = []
    time_marks: list[float] = []
    if len(reports) == 1:
        later_attempts = reports[0].attempts[1:]
        step_marks = [attempt.resumed_from for attempt in later_attempts if attempt.resumed_from is not None]
        time_marks = [(attempt.began - reports[0].attempts[0].began) / unit_s for attempt in later_attempts]
    for name in names:
        curves_over_steps = []
        curves_over_time = []
        all_points = []
        for report in reports:
            began = [attempt.began for attempt in report.attempts]
            points = report.measured.points(name, began, points_of_curve)
            all_points += points
            curves_over_steps.append([[(float(point.step), point) for point in points]])
            curves_over_time.append(_curve_over_time(points, began=report.began or 0.0, unit_s=unit_s))
        is_log = spans_powers_of_ten(all_points)
        yield {
            "title": _clean(name),
            "over_steps": chart(curves_over_steps, step_marks, width=last_step, is_logarithmic=is_log),
            "over_time": chart(curves_over_time, time_marks, width=longest_s / unit_s, is_logarithmic=is_log),
            "unit": unit,
            "is_logarithmic": is_log,
        }


def _names_of_charts(reports: Sequence[RunReport]) -> list[str]:
    """Return the metrics that have a chart: the rates, and of the others as many as fit on the page."""
    rates = [name for name in _LAST_CHARTS if any(report.measured.values(name) for report in reports)]
    names: set[str] = set()
    for report in reports:
        names.update(report.metrics)
    return [*_in_order_of_page(sorted(names))[: _CHARTS - len(rates)], *rates]


def _wall_s(report: RunReport) -> float | None:
    """Return the time from the first attempt to the end of the last one, in seconds; None before the first."""
    if report.began is None:
        return None
    return max(attempt.ended for attempt in report.attempts) - report.began
