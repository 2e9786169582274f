"""The page of a report: one HTML file without scripts, whose curves matplotlib draws as SVG in the page."""

from __future__ import annotations

import io
import logging
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from hpcddp.errors import UserError, printable
from hpcddp.manage.attempt_times import ON_NODES, Phase
from hpcddp.manage.first_error import shortened
from hpcddp.manage.format import NOTHING, duration_text, number_text, one_line, size_text, step_text
from hpcddp.manage.ranking import is_smaller_better
from hpcddp.manage.report import RunReport, ranked
from hpcddp.manage.run_metrics import Piece, joined_pieces
from hpcddp.manage.sweep_values import value_texts
from hpcddp.run.find import token_of
from hpcddp.version import __version__

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_RUNS_DRAWN: Final = 10
_RUNS_DETAILED: Final = 20
_ATTEMPTS_DRAWN: Final = 40
_CHARTS: Final = 14
# Points of all curves of a page together, and of one.
_POINTS: Final = 20_000
_MOST_POINTS, _FEWEST_POINTS = 600, 40
# Characters of diffs, job files and packages in a page.
_TEXT: Final = 300_000
_LONGEST_DIFF: Final = 100_000
_LOG_LINES: Final = 60
_LONGEST_LINE: Final = 400
_FIRST_CHARTS: Final = ("loss", "val_loss", "val_accuracy", "val_top5")
_LAST_CHARTS: Final = ("samples_per_s", "lr")
_LOGARITHMIC_FROM: Final = 1000
_WHOLE_RATES_FROM: Final = 100
_MARKED_POINTS: Final = 40
# A logarithmic axis cannot reach down to the smallest numbers of the machine.
_SMALLEST: Final = 1e-100
# A time that is later is damage (the year 5138).
_LATEST: Final = 1e11
_UNITS: Final = ((2 * 86400, 86400, "days"), (2 * 3600, 3600, "hours"), (120, 60, "minutes"), (0, 1, "seconds"))
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
# Colours that stand for variables of the page's style sheet, so that one drawing is light and dark.
_VARIABLE: Final = re.compile(r"#e0(?P<kind>[0-9a-f]{2})(?P<number>[0-9a-f]{2})")
_KINDS: Final = {"01": "c", "02": "p", "03": "ink", "04": "grid"}
_INK, _GRID = "#e00300", "#e00400"
_TAG: Final = re.compile("<[^>]+>")
_DECIMALS: Final = re.compile(r"(\d\.\d\d)\d+")


class NoMatplotlibError(UserError):
    """The library that draws is not installed."""

    kind = "no_matplotlib"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A metric of all runs, over steps and over wall time.

    Args:
        title: the name of the metric.
        over_steps: the SVG over steps.
        over_time: the SVG over wall time; empty where no times are known.
        unit: the unit of the wall time.
        is_logarithmic: whether the values have a logarithmic axis.
    """

    title: str
    over_steps: Markup
    over_time: Markup
    unit: str
    is_logarithmic: bool


def page(
    reports: Sequence[RunReport], *, title: str, now: float, is_sweep: bool = False, sorted_by: str | None = None
) -> str:
    """Return the page about runs.

    Args:
        reports: the runs, at least one.
        title: the title of the page.
        now: seconds since the epoch.
        is_sweep: whether the runs are the elements of a sweep.
        sorted_by: the metric by whose last values the runs are sorted; None sorts them by their best values.

    Raises:
        NoMatplotlibError: matplotlib is not installed.
    """
    draw = _Pen()
    metric, order = (sorted_by, list(reports)) if sorted_by or len(reports) == 1 else ranked(reports)
    heading = None if metric is None else f"the best {metric} first"
    if sorted_by is not None:
        heading = f"by the last {metric}, the {'smallest' if is_smaller_better(sorted_by) else 'largest'} first"
    with_curves = [report for report in order if report.measured.lines]
    drawn = with_curves[:_RUNS_DRAWN]
    detailed = order[:_RUNS_DETAILED]
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template.filters.update(
        {
            "duration": duration_text,
            "clean": _clean,
            "moment": _moment,
            "size": size_text,
            "number": _number,
            "rate": _rate,
            "part_of_a_step": _part_of_a_step,
        }
    )
    texts = _Texts()
    return template.from_string(files("hpcddp.manage").joinpath("report.html.j2").read_text(encoding="utf-8")).render(
        title=title,
        made=_moment(now),
        version=__version__,
        runs=[_run(report, draw, texts) for report in detailed],
        left_out=len(order) - len(detailed),
        is_single=len(reports) == 1,
        is_sweep=is_sweep,
        heading=heading,
        ranking=[_row(place, report, metric) for place, report in enumerate(order, start=1)] if len(order) > 1 else [],
        legend=[{"color": f"--c{place}", "label": label} for place, label in enumerate(_short_labels(drawn))],
        left_undrawn=len(with_curves) - len(drawn),
        charts=list(_charts(drawn, draw)),
    )


def _label(report: RunReport) -> str:
    if report.values:
        return _clean(f"{report.run.run_id}: {_values(report)}")
    return _clean(f"{report.run.path.parent.name}/{report.run.run_id}")


def _short_labels(reports: Sequence[RunReport]) -> list[str]:
    """Return what tells runs apart: the end of the run id, the job's name if there are several, the values."""
    tokens = Counter(token_of(report.run.run_id) for report in reports)
    has_several_names = len({report.run.path.parent.name for report in reports}) > 1
    labels = []
    for report in reports:
        token = token_of(report.run.run_id)
        label = token if tokens[token] == 1 else report.run.run_id
        if has_several_names:
            label = f"{report.run.path.parent.name} {label}"
        if report.values:
            label = f"{label}: {_values(report)}"
        labels.append(_clean(label))
    return labels


def _values(report: RunReport) -> str:
    texts = value_texts(report.values, report.status.files.changes)
    return " ".join(f"{key.rpartition('.')[2]}={text}" for key, text in texts.items())


def _clean(text: object) -> str:
    return one_line(str(text))


def _moment(seconds: float | None) -> str:
    if seconds is None or not 0 <= seconds < _LATEST:
        return NOTHING
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _number(value: float | None, form: str = ".4g") -> str:
    return number_text(value, form)


def _rate(value: float | None) -> str:
    return number_text(value, ".3g" if value is not None and value < _WHOLE_RATES_FROM else ",.0f")


def _part_of_a_step(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


class _Texts:
    """Cuts the long texts of a page, so that it stays small."""

    def __init__(self) -> None:
        self._left = _TEXT
        self._seen: set[str] = set()

    def take(self, text: str, most: int) -> str:
        """Return the beginning of a text, without control characters; nothing of one that is on the page already."""
        if text in self._seen:
            return ""
        self._seen.add(text)
        kept = printable(text[: min(most, self._left)])
        self._left -= len(kept)
        return kept


def _row(place: int, report: RunReport, metric: str | None) -> dict[str, Any]:
    best, last = (None, None) if metric is None else (report.best(metric), report.last(metric))
    return {
        "place": place,
        "label": _label(report),
        "anchor": report.run.run_id,
        "state": str(report.status.state),
        "best": best,
        "last": last,
        "step": report.status.step,
        "hours": report.goodput.total_device_hours,
        "goodput": report.goodput.value,
        "throughput": (report.throughput or {}).get("median"),
    }


def _run(report: RunReport, draw: _Pen, texts: _Texts) -> dict[str, Any]:
    goodput = report.goodput
    seconds, hours = goodput.seconds, goodput.device_hours
    # The longest part first; the queue has no part of the time on the nodes.
    parts = sorted((phase for phase in ON_NODES if seconds.get(phase)), key=lambda phase: -seconds[phase])
    began, ended = report.began, max((attempt.ended for attempt in report.attempts), default=None)
    files_ = report.status.files
    return {
        "id": report.run.run_id,
        "label": _label(report),
        "directory": str(report.run.path),
        "state": str(report.status.state),
        "reason": report.reason,
        "job": None if files_.job is None else files_.job.job_id,
        "steps": step_text(report.status.step, files_.total_steps),
        "metrics": [
            {
                "name": name,
                "best": report.best(name),
                "last": report.last(name),
                "rule": "smallest" if is_smaller_better(name) else "largest",
            }
            for name in _ordered(report.metrics)
        ],
        "began": began,
        "ended": ended,
        "is_running": any(attempt.is_running for attempt in report.attempts),
        "wall_s": None if began is None or ended is None else ended - began,
        "queue_s": seconds.get(Phase.QUEUE),
        "device": report.device,
        "hours": goodput.total_device_hours,
        "goodput": goodput.value,
        "unknown": goodput.unknown,
        "advice": report.advice.sentence,
        "parts": [
            {
                "color": f"--p{list(Phase).index(phase)}",
                "label": PHASES[phase],
                "seconds": seconds[phase],
                "share": report.share(phase),
                "hours": None if hours is None else hours[phase],
            }
            for phase in parts
        ],
        "attempts": report.attempts,
        "phases": [
            {"color": f"--p{place}", "label": PHASES[phase]}
            for place, phase in enumerate(Phase)
            if any(attempt.seconds.get(phase) for attempt in report.attempts)
        ],
        "changes": {attempt.number: _clean(", ".join(report.changes(attempt.number))) for attempt in report.attempts},
        "Phase": Phase,
        "timeline": draw.timeline(report),
        "throughput": report.throughput,
        "data_wait": report.data_wait,
        "slowest_rank": report.slowest_rank,
        "saves": _durations(report.saves),
        "checkpoints": report.checkpoints,
        "error": _error(report),
        "sources": [
            {
                "source": source,
                "diff": texts.take(source.diff, _LONGEST_DIFF),
                "packages": ", ".join(f"{name} {version}" for name, version in source.packages.items()),
            }
            for source in report.sources
        ],
        "code_changes": report.code_changes,
        "job_file": texts.take(_read(report), _LONGEST_DIFF),
        "damaged": report.damaged,
    }


def _durations(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    return {"count": len(seconds), "mean": sum(seconds) / len(seconds), "longest": max(seconds)}


def _read(report: RunReport) -> str:
    from hpcddp.jobfile.write import dump_job

    return "" if report.spec is None else dump_job(report.spec, environment_values=False)


def _error(report: RunReport) -> dict[str, Any] | None:
    error = report.error
    if error is None:
        return None
    lines = shortened(error.text) if error.is_traceback else list(error.text)
    shown = [line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]} ..." for line in lines[-_LOG_LINES:]]
    return {
        "attempt": error.attempt.number,
        "sentence": error.sentence,
        "text": printable("\n".join(shown)),
        "is_traceback": error.is_traceback,
        "others": error.others,
        "secondary": error.secondary,
    }


def _ordered(names: Sequence[str]) -> list[str]:
    """Return the names of metrics in the order of a page."""
    first = [name for name in _FIRST_CHARTS if name in names]
    return [*first, *sorted(name for name in names if name not in first)]


def _charts(reports: Sequence[RunReport], draw: _Pen) -> Iterator[Chart]:
    """Yield a chart for each metric; the first run has the first colour."""
    measured = {name for report in reports for name in report.metrics}
    rates = [name for name in _LAST_CHARTS if any(name in report.measured.metrics for report in reports)]
    names = [*_ordered(sorted(measured))[: _CHARTS - len(rates)], *rates]
    points = max(_FEWEST_POINTS, min(_MOST_POINTS, _POINTS // max(1, 4 * len(names) * len(reports))))
    longest = max((_length(report) for report in reports), default=0.0)
    unit_s, unit = next((size, unit) for at_least, size, unit in _UNITS if longest >= at_least)
    last_step = max((report.measured.last_step for report in reports), default=0)
    for name in names:
        by_step, by_time = [], []
        for color, report in enumerate(reports):
            metric = report.measured.metrics.get(name)
            if metric is not None:
                lines = sum(piece.lines for piece in metric.pieces)
                pieces = joined_pieces(metric.pieces, math.ceil(lines / points))
                by_step.append(_Curve.over_steps(pieces, color))
                by_time.append(_Curve.over_time(pieces, color, began=report.began or 0.0, unit_s=unit_s))
        step_marks, time_marks = _marks(reports[0]) if len(reports) == 1 else ([], [])
        time_marks = [moment / unit_s for moment in time_marks]
        is_logarithmic = _spans_powers_of_ten(by_step)
        yield Chart(
            title=_clean(name),
            over_steps=draw.chart(by_step, step_marks, width=last_step, is_logarithmic=is_logarithmic),
            over_time=draw.chart(by_time, time_marks, width=longest / unit_s, is_logarithmic=is_logarithmic),
            unit=unit,
            is_logarithmic=is_logarithmic,
        )


def _spans_powers_of_ten(curves: Sequence[_Curve]) -> bool:
    lowest = min((value for curve in curves for value in curve.low), default=0.0)
    highest = max((value for curve in curves for value in curve.high), default=0.0)
    return lowest > _SMALLEST and highest > _LOGARITHMIC_FROM * lowest


def _length(report: RunReport) -> float:
    began = report.began
    return 0.0 if began is None else max(attempt.ended for attempt in report.attempts) - began


def _marks(report: RunReport) -> tuple[list[float], list[float]]:
    """Return where later attempts begin: their steps and their times."""
    began = report.began or 0.0
    later = report.attempts[1:]
    steps = [float(attempt.resumed_from) for attempt in later if attempt.resumed_from is not None]
    return steps, [attempt.began - began for attempt in later]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Curve:
    """A curve with few points: the mean of each group of neighbours, and their smallest and largest values.

    Args:
        x: the mean place of each group.
        mean: its mean.
        low: its smallest value.
        high: its largest value.
        color: the number of the colour.
    """

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]
    color: int

    @classmethod
    def over_steps(cls, pieces: Sequence[Piece], color: int) -> _Curve:
        """Return the curve of pieces over steps."""
        return cls(
            x=[piece.steps / piece.lines for piece in pieces],
            mean=[piece.total / piece.lines for piece in pieces],
            low=[piece.low for piece in pieces],
            high=[piece.high for piece in pieces],
            color=color,
        )

    @classmethod
    def over_time(cls, pieces: Sequence[Piece], color: int, *, began: float, unit_s: float) -> _Curve:
        """Return the curve of pieces over the wall time; it is interrupted between attempts.

        Args:
            pieces: the values.
            color: the number of the colour.
            began: when the run began, in seconds since the epoch.
            unit_s: the unit of the wall time, in seconds.
        """
        curve = cls(x=[], mean=[], low=[], high=[], color=color)
        before = None
        for piece in pieces:
            time = piece.times / piece.lines
            if not math.isfinite(time):
                continue
            if before not in {None, piece.place}:
                curve.add(math.nan, math.nan, math.nan, math.nan)
            curve.add((time - began) / unit_s, piece.total / piece.lines, piece.low, piece.high)
            before = piece.place
        return curve

    def add(self, x: float, mean: float, low: float, high: float) -> None:
        """Add a point, or a gap."""
        self.x.append(x)
        self.mean.append(mean)
        self.low.append(low)
        self.high.append(high)


class _Pen:
    """Draws with matplotlib.

    Raises:
        NoMatplotlibError: it is not installed.
    """

    def __init__(self) -> None:
        # Its notes about fonts and its cache are not for the users of a command.
        logging.getLogger("matplotlib").setLevel(logging.ERROR)
        try:
            import matplotlib.backends.backend_svg
            import matplotlib.figure
        except ImportError as error:
            raise NoMatplotlibError(
                f"the page of a report needs matplotlib ({error}); install it: {sys.executable} -m pip install "
                "'matplotlib>=3.9', or print the numbers: hpcddp report --json"
            ) from error
        self._matplotlib = matplotlib
        self._drawn = 0

    def chart(self, curves: Sequence[_Curve], marks: Sequence[float], *, width: float, is_logarithmic: bool) -> Markup:
        """Return the drawing of curves, with a line at each mark; empty if no curve has points.

        Args:
            curves: the curves.
            marks: places on the horizontal axis.
            width: the end of that axis, which is the same for all metrics.
            is_logarithmic: whether the vertical axis is logarithmic; all values are positive.
        """
        if not any(curve.x for curve in curves):
            return Markup()

        def draw(axes: Axes) -> None:
            for mark in marks[:200]:
                axes.axvline(mark, color=_INK, linewidth=0.7, linestyle=(0, (2, 3)), alpha=0.6)
            for curve in curves:
                color = f"#e001{curve.color:02x}"
                if len(curves) == 1 and curve.low != curve.high:
                    axes.fill_between(curve.x, curve.low, curve.high, color=color, alpha=0.22, linewidth=0)
                few = len(curve.x) <= _MARKED_POINTS
                axes.plot(curve.x, curve.mean, color=color, linewidth=1.5, marker="." if few else None, markersize=5)
            axes.set_xlim(-0.02 * width, 1.02 * width or 1)
            if is_logarithmic:
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter("{x:g}")
            axes.grid(visible=True, color=_GRID, linewidth=0.7)

        return self._svg(draw, width=4.9, height=2.15)

    def timeline(self, report: RunReport) -> Markup:
        """Return the drawing of the attempts of a run, a row for each."""
        attempts = report.attempts[-_ATTEMPTS_DRAWN:]
        if not attempts:
            return Markup()
        first = min(span.began for attempt in attempts for span in attempt.spans)
        last = max(attempt.ended for attempt in attempts)
        unit_s, unit = next((size, unit) for at_least, size, unit in _UNITS if last - first >= at_least)
        colors = {phase: f"#e002{place:02x}" for place, phase in enumerate(Phase)}

        def draw(axes: Axes) -> None:
            for row, attempt in enumerate(attempts):
                for phase in Phase:
                    bars = [
                        ((span.began - first) / unit_s, (span.ended - span.began) / unit_s)
                        for span in attempt.spans
                        if span.phase is phase and span.ended > span.began
                    ]
                    if bars:
                        # Short parts lie on the training that they interrupt.
                        level = 1 if phase is Phase.TRAINING else 2
                        axes.broken_barh(bars, (row - 0.36, 0.72), facecolors=colors[phase], zorder=level)
            axes.set_ylim(len(attempts) - 0.4, -0.6)
            axes.set_yticks(range(len(attempts)), [f"attempt {attempt.number}" for attempt in attempts])
            axes.set_xlim(0, max((last - first) / unit_s, 1e-9))
            axes.set_xlabel(unit)
            axes.grid(visible=True, axis="x", color=_GRID, linewidth=0.7)
            axes.set_axisbelow(True)

        return self._svg(draw, width=8.6, height=0.6 + 0.3 * len(attempts), left=0.95, below=0.45)

    def _svg(
        self, draw: Callable[[Axes], None], *, width: float, height: float, left: float = 0.6, below: float = 0.25
    ) -> Markup:
        """Return a drawing as SVG for a page; nothing in it comes from a run but numbers.

        Args:
            draw: draws on the axes.
            width: inches.
            height: inches.
            left: inches for the labels at the left.
            below: inches for the labels below the axes.
        """
        self._drawn += 1
        style: dict[Any, Any] = {
            "svg.fonttype": "none", "svg.hashsalt": str(self._drawn), "font.size": 8.5, "text.color": _INK,
            "axes.edgecolor": _GRID, "axes.labelcolor": _INK, "xtick.color": _GRID, "ytick.color": _GRID,
            "xtick.labelcolor": _INK, "ytick.labelcolor": _INK, "axes.spines.top": False, "axes.spines.right": False,
            "axes.unicode_minus": False, "text.parse_math": False, "axes.formatter.limits": (-4, 6),
        }  # fmt: skip
        with self._matplotlib.rc_context(style):
            figure = self._matplotlib.figure.Figure(figsize=(width, height))
            # A layout that adapts itself takes longer than the drawing.
            edges = {"left": left / width, "right": 1 - 0.28 / width, "top": 1 - 0.1 / height, "bottom": below / height}
            figure.subplots_adjust(**edges)
            figure.patch.set_visible(False)
            axes = figure.add_subplot()
            axes.patch.set_visible(False)
            draw(axes)
            text = io.StringIO()
            figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
        return Markup(_for_page(text.getvalue()))  # noqa: S704  drawn here


def _for_page(svg: str) -> str:
    """Return the SVG of matplotlib for a page: with variables as colours, and in the width of its place."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)
    svg = re.sub(r'^<svg([^>]*?) width="[^"]*"', r"<svg\1", svg)
    svg = re.sub(r'^(<svg[^>]*?) height="[^"]*"', r"\1", svg)
    svg = svg.replace("<svg ", '<svg role="img" ', 1)
    svg = _VARIABLE.sub(_variable, svg)
    # Numbers in paths need no more; those on the axes stay as they are.
    return _TAG.sub(lambda tag: _DECIMALS.sub(r"\1", tag[0]), svg)


def _variable(match: re.Match[str]) -> str:
    kind = _KINDS.get(match["kind"], "ink")
    return f"var(--{kind}{int(match['number'], 16)})" if len(kind) == 1 else f"var(--{kind})"
