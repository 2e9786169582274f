"""The elements of a sweep as a table with their values and one metric, the best first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from hpcddp.errors import UserError, nearest
from hpcddp.manage.format import NOTHING, number_text, one_line, step_text
from hpcddp.manage.overview import SweepStatus, short_keys, value_texts, values_now
from hpcddp.manage.overview_text import Paint, remarks_on
from hpcddp.manage.run_files import lines_or_damage, record_or_damage
from hpcddp.manage.status import RunStatus
from hpcddp.manage.table import Column, table_lines, table_width
from hpcddp.run.evaluations import mode_of
from hpcddp.run.metrics import MetricsLine, read_metrics
from hpcddp.run.result import read_result

# The newest evaluation is most often in the first; the second is some thousands of steps.
_TAILS_BYTES: Final = (16 * 1024, 1024 * 1024)
_LONGEST_CUT_VALUE: Final = 12


class RankingError(UserError):
    """A sweep that cannot be sorted by a metric."""

    kind = "ranking"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """An element of a sweep.

    Args:
        index: its number in the sweep.
        metric: the newest value of the metric; None where it has none, or it was not finite.
    """

    index: int
    values: Mapping[str, Any]
    status: RunStatus
    metric: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The elements of a sweep, the best first; those without a value come last, in their order in the sweep."""

    sweep: SweepStatus
    metric: str
    elements: tuple[Ranked, ...]

    @property
    def sentence(self) -> str:
        """What the order is."""
        return f"by {self.metric}, the {best_extreme(self.metric)} first"

    def as_json(self) -> dict[str, Any]:
        """Return the document of the sweep with its elements in this order."""
        return {
            **self.sweep.as_json(),
            "sorted_by": self.metric,
            "smaller_is_better": is_smaller_better(self.metric),
            "elements": [
                {
                    **element.status.as_json(),
                    "values": values_now(element.values, element.status.files.changes),
                    "index": element.index,
                    "metric": element.metric,
                }
                for element in self.elements
            ],
        }

    def table(self, *, width: int | None, paint: Paint) -> list[str]:
        """Return the lines of a table.

        Where it does not fit, the step is hidden and long values are cut, then values are hidden, the last one first.

        Args:
            width: columns of the terminal; None prints everything.
            paint: gives a state its colour.
        """
        statuses = [element.status for element in self.elements]
        indices = [str(element.index) for element in self.elements]
        metrics = [number_text(element.metric, ".5g") for element in self.elements]
        steps = [step_text(status.step, status.files.total_steps) for status in statuses]
        index_column = Column(title="element", cells=indices, is_number=True)
        metric_column = Column(title=one_line(self.metric), cells=metrics, is_number=True)
        step_column = Column(title="step", cells=steps)
        state_column = Column(
            title="state",
            cells=[str(status.state) for status in statuses],
            paint=lambda row, text: paint(text, statuses[row].state),
        )
        texts = [value_texts(element.values, element.status.files.changes) for element in self.elements]
        values = []
        for key, name in short_keys(self.sweep.sweep).items():
            cells = [one_line(texts_of_element.get(key, NOTHING)) for texts_of_element in texts]
            values.append(Column(title=one_line(name), cells=cells))
        columns = [index_column, metric_column, *values, step_column, state_column]
        hidden: list[str] = []
        if width is not None and table_width(columns) > width:
            hidden.append(step_column.title)
            values = [replace(column, most_characters=_LONGEST_CUT_VALUE) for column in values]
            columns = [index_column, metric_column, *values, state_column]
            while values and table_width(columns) > width:
                hidden.append(values.pop().title)
                columns = [index_column, metric_column, *values, state_column]
        return [*table_lines(columns, hidden=hidden), *remarks_on([self.sweep])]


def is_smaller_better(metric: str) -> bool:
    """Return whether a smaller value of a metric is better, which its name tells: a loss, or an error."""
    return mode_of(metric) == "min"


def best_extreme(metric: str) -> str:
    """Return which value of a metric is the best one: ``smallest`` or ``largest``."""
    return "smallest" if is_smaller_better(metric) else "largest"


def rank_only(lines: Sequence[RunStatus | SweepStatus], metric: str, *, command: str) -> Ranking:
    """Return the ranking of the only sweep that a command is about; the arguments are those of ``rank``.

    Raises:
        RankingError: not exactly one run was named, or it is not a sweep; or as ``rank``.
    """
    if len(lines) != 1:
        raise RankingError(f"--sort sorts the runs of one sweep; name it: hpcddp {command} SWEEP --sort METRIC")
    (only,) = lines
    if isinstance(only, RunStatus):
        raise RankingError(f"--sort sorts the runs of one sweep, and {only.run.run_id} is one run; leave --sort out")
    return rank(only, metric)


def rank(sweep: SweepStatus, metric: str) -> Ranking:
    """Return the elements of a sweep, sorted by the newest value of a metric.

    Args:
        metric: a name in ``metrics.jsonl`` or ``result.json``.

    Raises:
        RankingError: the elements have metrics, and not this one.
    """
    # The names are the keys, in the order in which they are found.
    metric_names: dict[str, None] = {}
    elements = []
    for index, (values, status) in enumerate(zip(sweep.sweep.elements, sweep.elements, strict=True)):
        value, names = _newest_value(status, metric)
        metric_names.update(dict.fromkeys(names))
        elements.append(Ranked(index=index, values=values, status=status, metric=value))
    if metric_names and metric not in metric_names:
        near = nearest(metric, metric_names)
        instead = f"did you mean {near}? They" if near else "they"
        raise RankingError(
            f"--sort is {metric!r}, which no element of the sweep {sweep.sweep.sweep_id} has written; {instead} have "
            f"{', '.join(sorted(metric_names))}"
        )
    # The sort is stable, so that elements without a value keep their order.
    elements.sort(key=lambda element: sort_key(metric, element.metric))
    return Ranking(sweep=sweep, metric=metric, elements=tuple(elements))


def sort_key(metric: str, value: float | None) -> float:
    """Return a number that is smaller for a better value of a metric; that of None is the largest."""
    if value is None:
        return math.inf
    return value if is_smaller_better(metric) else -value


def _newest_value(status: RunStatus, metric: str) -> tuple[float | None, list[str]]:
    """Return the newest value of a metric of a run, and the names of all its metrics.

    A newest value that is not finite is None: a run that has diverged is not ranked by what it was before.
    """
    log = status.run.metrics
    names: dict[str, None] = {}
    for tail_bytes in _TAILS_BYTES:
        lines, _ = lines_or_damage(log, partial(read_metrics, log, tail_bytes))
        for line in lines:
            names.update(dict.fromkeys(name for name in line.facts if line.number(name) is not None))
        lines_with_metric = [line for line in lines if metric in line.facts]
        if lines_with_metric:
            return lines_with_metric[-1].number(metric), [*names, metric]
    result, _ = record_or_damage(lambda: read_result(status.run))
    if result is not None:
        value = MetricsLine(step=0, facts=result.as_json()).number(metric)
        if value is not None:
            return value, [*names, metric]
    return None, list(names)
