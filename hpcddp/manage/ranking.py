"""The elements of a sweep as a table with their values and one metric, the best first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hpcddp.errors import UserError, nearest
from hpcddp.manage.format import NOTHING, number_text, one_line, step_text
from hpcddp.manage.overview import Paint, SweepStatus, remarks_on, short_keys, value_texts, values_now
from hpcddp.manage.run_files import readable, readable_lines
from hpcddp.manage.status import RunStatus
from hpcddp.run.directory import RunDirectory
from hpcddp.run.evaluations import mode_of
from hpcddp.run.metrics import MetricsLine, read_metrics
from hpcddp.run.result import read_result

# The newest evaluation is most often in the first; the second is some thousands of steps.
_TAILS_BYTES: Final = (16 * 1024, 1024 * 1024)
_BETWEEN: Final = "  "
_SHORTEST_VALUE: Final = 6
_CUT: Final = "..."


class RankingError(UserError):
    """A sweep that cannot be sorted by a metric."""

    kind = "ranking"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """An element of a sweep.

    Args:
        index: its number in the sweep.
        values: its values by key.
        status: its state.
        metric: the newest value of the metric; None where it has none, or it was not finite.
    """

    index: int
    values: Mapping[str, Any]
    status: RunStatus
    metric: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The elements of a sweep, the best first; those without a value come last, in their order in the sweep.

    Args:
        sweep: the sweep.
        metric: the name of the metric.
        elements: its elements in this order.
    """

    sweep: SweepStatus
    metric: str
    elements: tuple[Ranked, ...]

    @property
    def sentence(self) -> str:
        """What the order is."""
        return f"by {self.metric}, the {'smallest' if is_smaller_better(self.metric) else 'largest'} first"

    def as_json(self) -> dict[str, Any]:
        """Return the document of the sweep with its elements in this order."""
        return {
            **self.sweep.as_json(),
            "sorted_by": self.metric,
            "smaller_is_better": is_smaller_better(self.metric),
            "elements": [
                {
                    **one.status.as_json(),
                    "values": values_now(one.values, one.status.files.changes),
                    "index": one.index,
                    "metric": one.metric,
                }
                for one in self.elements
            ],
        }

    def table(self, *, width: int | None, paint: Paint) -> list[str]:
        """Return the lines of a table.

        Args:
            width: columns of the terminal; None prints everything.
            paint: gives a state its colour.
        """
        keys = {key: one_line(name) for key, name in short_keys(self.sweep.sweep).items()}
        texts = [value_texts(one.values, one.status.files.changes) for one in self.elements]
        values = {key: [one_line(text.get(key, NOTHING)) for text in texts] for key in keys}
        columns = [
            _Column("element", [str(one.index) for one in self.elements], is_number=True),
            _Column(one_line(self.metric), [number_text(one.metric, ".5g") for one in self.elements], is_number=True),
            *(_Column(name, values[key], is_value=True) for key, name in keys.items()),
            _Column("step", [step_text(one.status.step, one.status.files.total_steps) for one in self.elements]),
            _Column("state", [str(one.status.state) for one in self.elements]),
        ]
        columns, hidden = _that_fit(columns, width)
        lines = [_BETWEEN.join(column.text(None) for column in columns).rstrip()]
        for row, one in enumerate(self.elements):
            cells = [column.text(row) for column in columns]
            if columns[-1].title == "state":
                cells[-1] = paint(cells[-1].rstrip(), one.status.state)
            lines.append(_BETWEEN.join(cells).rstrip())
        if hidden:
            lines.append(f"(columns hidden: {', '.join(hidden)})")
        return [*lines, *remarks_on([self.sweep])]


def is_smaller_better(metric: str) -> bool:
    """Return whether a smaller value of a metric is better, which its name tells: a loss, or an error."""
    return mode_of(metric) == "min"


def rank_only(lines: Sequence[RunStatus | SweepStatus], metric: str, *, command: str) -> Ranking:
    """Return the ranking of the only sweep that a command is about; the arguments are those of ``rank``.

    Raises:
        RankingError: there is another number of runs, or the only one is no sweep; or as ``rank``.
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
        sweep: the sweep.
        metric: the name of the metric in ``metrics.jsonl`` or ``result.json``.

    Raises:
        RankingError: the elements have metrics, and not this one.
    """
    known: dict[str, None] = {}
    elements = []
    for index, (values, status) in enumerate(zip(sweep.sweep.elements, sweep.elements, strict=True)):
        value, names = _newest(status, metric)
        known |= dict.fromkeys(names)
        elements.append(Ranked(index=index, values=values, status=status, metric=value))
    if known and metric not in known:
        near = nearest(metric, known)
        meant = f"did you mean {near}? They" if near else "they"
        raise RankingError(
            f"--sort is {metric!r}, which no element of the sweep {sweep.sweep.sweep_id} has written; {meant} have "
            f"{', '.join(sorted(known))}"
        )
    sign = 1 if is_smaller_better(metric) else -1
    # The sort is stable, so that elements without a value keep their order.
    elements.sort(key=lambda one: math.inf if one.metric is None else sign * one.metric)
    return Ranking(sweep=sweep, metric=metric, elements=tuple(elements))


def _newest(status: RunStatus, metric: str) -> tuple[float | None, list[str]]:
    """Return the newest value of a metric of a run, and the names of all its metrics.

    A newest value that is not finite is None: a run that has diverged is not ranked by what it was before.
    """
    run = status.run
    names: dict[str, None] = {}
    for size in _TAILS_BYTES:
        lines = _last_lines(run, size)
        names |= {name: None for line in lines for name in line.facts if line.number(name) is not None}
        having = [line for line in lines if metric in line.facts]
        if having:
            return having[-1].number(metric), [*names, metric]
    result, _ = readable(lambda: read_result(run))
    if result is not None:
        value = MetricsLine(step=0, facts=result.as_json()).number(metric)
        if value is not None:
            return value, [*names, metric]
    return None, list(names)


def _last_lines(run: RunDirectory, size: int) -> tuple[MetricsLine, ...]:
    lines, _ = readable_lines(run.metrics, lambda: read_metrics(run.metrics, size))
    return lines


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of the table.

    Args:
        title: its name.
        cells: its texts.
        is_number: whether they are aligned on the right.
        is_value: whether they are values of the sweep, which may be cut.
        longest: the most characters that are shown; None shows all.
    """

    title: str
    cells: Sequence[str]
    is_number: bool = False
    is_value: bool = False
    longest: int | None = None

    @property
    def width(self) -> int:
        full = max(len(text) for text in (self.title, *self.cells))
        return full if self.longest is None else min(full, self.longest)

    def text(self, row: int | None) -> str:
        """Return the text of a row, or the title for None, as wide as the column."""
        text = self.title if row is None else self.cells[row]
        if len(text) > self.width:
            text = f"{text[: self.width - len(_CUT)]}{_CUT}"
        return f"{text:>{self.width}}" if self.is_number else f"{text:<{self.width}}"


def _that_fit(columns: list[_Column], width: int | None) -> tuple[list[_Column], list[str]]:
    """Return the columns that fit into a width, long values cut, and the titles of those that are hidden."""
    hidden: list[str] = []

    def excess() -> int:
        return 0 if width is None else sum(column.width + len(_BETWEEN) for column in columns) - len(_BETWEEN) - width

    def hide(column: _Column) -> None:
        columns.remove(column)
        hidden.append(column.title)

    if excess() > 0:
        hide(next(column for column in columns if column.title == "step"))
    while (more := excess()) > 0:
        values = [column for column in columns if column.is_value]
        if not values:
            break
        widest = max(values, key=lambda column: column.width)
        if widest.width > _SHORTEST_VALUE:
            second = max([_SHORTEST_VALUE, *(column.width for column in values if column is not widest)])
            length = max(_SHORTEST_VALUE, widest.width - more, min(second, widest.width - 1))
            cut = _Column(widest.title, widest.cells, is_value=True, longest=length)
            columns[columns.index(widest)] = cut
        else:
            hide(values[-1])
    return columns, hidden
