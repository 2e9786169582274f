"""The elements of a sweep as a table with their values and one metric, the best first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from hpcddp.errors import UserError, nearest
from hpcddp.manage.overview import SweepStatus
from hpcddp.manage.run_files import RecordReader
from hpcddp.manage.status import RunStatus
from hpcddp.run.evaluations import mode_of
from hpcddp.run.metrics import MetricsLine, read_metrics
from hpcddp.run.result import read_result

# The newest evaluation is most often in the first; the second is some thousands of steps.
_TAILS_BYTES: Final = (16 * 1024, 1024 * 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The elements of a sweep, the best first; those without a value come last, in their order in the sweep.

    Args:
        values: the newest value of the metric by the number of each element; None where it has none, or it was not
            finite.
    """

    sweep: SweepStatus
    metric: str
    values: Mapping[int, float | None]

    @property
    def sentence(self) -> str:
        """What the order is."""
        extreme = "smallest" if is_smaller_better(self.metric) else "largest"
        return f"by {self.metric}, the {extreme} first"

    def as_json(self) -> dict[str, Any]:
        """Return the document of the sweep with its elements in this order."""
        document = self.sweep.as_json()
        elements = document["elements"]
        return {
            **document,
            "sorted_by": self.metric,
            "smaller_is_better": is_smaller_better(self.metric),
            "elements": [{**elements[index], "index": index, "metric": value} for index, value in self.values.items()],
        }


def is_smaller_better(metric: str) -> bool:
    """Return whether a smaller value of a metric is better, which its name tells: a loss, or an error."""
    return mode_of(metric) == "min"


def rank_only(lines: Sequence[RunStatus | SweepStatus], metric: str) -> Ranking:
    """Return the ranking of the only sweep that a command is about; the arguments are those of ``rank``.

    Raises:
        UserError: not exactly one run was named, or it is not a sweep; or as ``rank``.
    """
    if len(lines) != 1:
        raise UserError("--sort sorts the runs of one sweep; name it: hpcddp status SWEEP --sort METRIC")
    (only,) = lines
    if isinstance(only, RunStatus):
        raise UserError(f"--sort sorts the runs of one sweep, and {only.run.run_id} is one run; leave --sort out")
    return rank(only, metric)


def rank(sweep: SweepStatus, metric: str) -> Ranking:
    """Return the elements of a sweep, sorted by the newest value of a metric.

    Args:
        metric: a name in ``metrics.jsonl`` or ``result.json``.

    Raises:
        UserError: the elements have metrics, and not this one.
    """
    # The names are the keys, in the order in which they are found.
    metric_names: dict[str, None] = {}
    values = {}
    for index, status in enumerate(sweep.elements):
        values[index], names = _newest_value(status, metric)
        metric_names.update(dict.fromkeys(names))
    if metric_names and metric not in metric_names:
        near = nearest(metric, metric_names)
        instead = f"did you mean {near}? They" if near else "they"
        raise UserError(
            f"--sort is {metric!r}, which no element of the sweep {sweep.sweep.sweep_id} has written; {instead} have "
            f"{', '.join(sorted(metric_names))}"
        )
    # The sort is stable, so that elements without a value keep their order.
    order = sorted(values, key=lambda index: sort_key(metric, values[index]))
    return Ranking(sweep=sweep, metric=metric, values={index: values[index] for index in order})


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
        lines = RecordReader().lines(log, partial(read_metrics, log, tail_bytes))
        for line in lines:
            names.update(dict.fromkeys(name for name in line.facts if line.number(name) is not None))
        lines_with_metric = [line for line in lines if metric in line.facts]
        if lines_with_metric:
            return lines_with_metric[-1].number(metric), [*names, metric]
    result = RecordReader().read(lambda: read_result(status.run))
    if result is not None:
        value = MetricsLine(step=0, facts=result.as_json()).number(metric)
        if value is not None:
            return value, [*names, metric]
    return None, list(names)
