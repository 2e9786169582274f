"""The page of a report: one HTML file without scripts, with its curves as SVG."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any, Final

from jinja2 import Environment, StrictUndefined, Template

from hpcddp.errors import printable
from hpcddp.manage.attempt_times import ON_NODES, Phase
from hpcddp.manage.first_error import FirstError, shortened
from hpcddp.manage.format import NOTHING, duration_text, number_text, one_line, size_text, step_text
from hpcddp.manage.ranking import best_extreme
from hpcddp.manage.report import RunReport, ranked
from hpcddp.manage.report_drawing import Curve, chart, spans_powers_of_ten, time_unit, timeline
from hpcddp.run.find import token_of
from hpcddp.version import __version__

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
    Phase.HANG: "hang",
    Phase.EVALUATION: "evaluation",
    Phase.SAVE: "waiting for saves",
    Phase.STOP: "stop",
    Phase.PROGRAM: "program without steps",
    Phase.OTHER: "other",
}


def page(
    reports: Sequence[RunReport], *, title: str, now: float, is_sweep: bool = False, sorted_by: str | None = None
) -> str:
    """Return the page about runs.

    Args:
        reports: the runs, at least one.
        now: seconds since the epoch.
        is_sweep: whether the runs are the elements of a sweep.
        sorted_by: the metric by whose last values the runs are sorted; None sorts them by their best values.
    """
    is_single = len(reports) == 1
    heading = None
    if sorted_by is not None:
        metric: str | None = sorted_by
        order = list(reports)
        heading = f"by the last {sorted_by}, the {best_extreme(sorted_by)} first"
    elif is_single:
        metric = None
        order = list(reports)
    else:
        metric, order = ranked(reports)
        if metric is not None:
            heading = f"the best {metric} first"
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
        heading=heading,
        ranking=[] if is_single else order,
        metric=metric,
        Phase=Phase,
        phase_names=PHASES,
        legend=[{"color": f"--c{color}", "label": label} for color, label in enumerate(_short_labels(drawn))],
        left_undrawn=len(with_curves) - len(drawn),
        charts=list(_charts(drawn)),
    )


def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(
        {
            "duration": duration_text,
            "label": _label,
            "best_extreme": best_extreme,
            "color": lambda phase: f"--p{list(Phase).index(phase)}",
            "clean": _clean,
            "moment": _moment,
            "size": size_text,
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


def _short_labels(reports: Sequence[RunReport]) -> list[str]:
    """Return what tells runs apart: the end of the run id, the job's name if there are several, the values."""
    tokens = Counter(token_of(report.run.run_id) for report in reports)
    has_several_names = len({report.run.name for report in reports}) > 1
    labels = []
    for report in reports:
        token = token_of(report.run.run_id)
        label = token if tokens[token] == 1 else report.run.run_id
        if has_several_names:
            label = f"{report.run.name} {label}"
        if report.values:
            label = f"{label}: {report.values_text}"
        labels.append(_clean(label))
    return labels


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
    parts = [phase for phase in ON_NODES if seconds.get(phase)]
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
        "parts": sorted(parts, key=lambda phase: -seconds[phase]),
        "hours": goodput.device_hours,
        "timeline": timeline(report.attempts),
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
        for color, report in enumerate(reports):
            began = [attempt.began for attempt in report.attempts]
            points = report.measured.points(name, began, points_of_curve)
            all_points += points
            curves_over_steps.append(Curve.over_steps(points, color))
            curves_over_time.append(Curve.over_time(points, color, began=report.began or 0.0, unit_s=unit_s))
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
