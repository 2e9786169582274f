"""The metrics of the evaluations of a run: their values by step, the last and the best one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from hpcddp.run.files import LONGEST_LINE, open_regular, unreadable_sentence
from hpcddp.run.metrics import MetricsLine, blocks_of_lines, is_evaluation
from hpcddp.run.record import LARGEST_RECORD, RecordError, parse_lines

if TYPE_CHECKING:
    from hpcddp.jobfile.fields import Best

# The beginnings of these names, as they stand in a file.
_NEEDLES: Final = (b'"val', b'"eval', b'"dev', b'"test')
Mode = Literal["max", "min"]


_SMALLER_IS_BETTER: Final = re.compile(
    r"loss|error|perplexity|(^|[_/.-])(err|ppl|nll|mse|rmse|mae|wer|cer|fid)($|[_/.-])", re.IGNORECASE
)


def mode_of(name: str) -> Mode:
    """Return whether the largest or the smallest value of a metric is its best, by its name."""
    return "min" if _SMALLER_IS_BETTER.search(name) else "max"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The last and the best value of a metric over a run.

    Args:
        last_step: optimizer steps done there.
        best: the largest value, or the smallest one for a ``mode`` of ``min``; the first of several equal ones.
        best_step: optimizer steps done there.
        mode: which value is the best.
    """

    last: float
    last_step: int
    best: float
    best_step: int
    mode: Mode

    @property
    def sentence(self) -> str:
        """Both values in words."""
        best = f"{self.best:.4g} after step {self.best_step}"
        last = f"{self.last:.4g} after step {self.last_step}"
        if self.best_step == self.last_step:
            return f"best {best}, which is the last"
        return f"best {best}, last {last}"

    def as_json(self) -> dict[str, Any]:
        """Return the document that ``--json`` prints."""
        return asdict(self)


def best_of(values: Mapping[int, float], mode: Mode) -> int:
    """Return the step of the best value; the first of several equal ones. ``values`` is not empty."""
    sign = 1 if mode == "min" else -1
    return min(values, key=lambda step: (sign * values[step], step))


def summaries(path: Path, best: Best | None = None) -> dict[str, Summary]:
    """Return the last and the best value of each metric of the evaluations, by name.

    Args:
        path: the run's ``metrics.jsonl``; it need not exist.
        best: the job's ``checkpoint.best``: its metric may have any name, and a mode of its own.

    Raises:
        RecordError: it cannot be read.
    """
    summaries = {}
    for name, values in read_evaluations(path, best).items():
        mode = (best.mode if best is not None and name == best.metric else None) or mode_of(name)
        last_step = max(values)
        best_step = best_of(values, mode)
        summaries[name] = Summary(
            last=values[last_step], last_step=last_step, best=values[best_step], best_step=best_step, mode=mode
        )
    return summaries


def read_evaluations(path: Path, best: Best | None = None) -> dict[str, dict[int, float]]:
    """Return the values of each metric of the evaluations: by name, then by step in ascending order.

    Where the step of a metric goes back, a later attempt has resumed: its earlier values from that step on do not
    count, even if the new value is not finite. Damaged lines are left out.

    Args:
        path: as ``summaries`` has it. Of a file over 256 MiB the end is read.
        best: as ``summaries`` has it.

    Raises:
        RecordError: it cannot be read.
    """
    best_metric = None if best is None else best.metric
    needles: Sequence[bytes] = _NEEDLES
    if best_metric is not None:
        # Other programs may write a name that is not ASCII as it is.
        as_it_is = json.dumps(best_metric, ensure_ascii=False)
        needles = (*_NEEDLES, json.dumps(best_metric).encode(), as_it_is.encode())
    values: dict[str, dict[int, float]] = {}
    try:
        with open_regular(path) as (stream, size):
            stream.seek(max(0, size - LARGEST_RECORD))
            for block in blocks_of_lines(stream):
                lines = parse_lines(b"\n".join(_lines_with(block, needles)), MetricsLine)
                for line in lines.records:
                    _add_line(values, line, best_metric)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise RecordError(unreadable_sentence(path, error), path=path) from error
    return values


def _add_line(values: dict[str, dict[int, float]], line: MetricsLine, best_metric: str | None) -> None:
    """Add the metrics of an evaluation on a line; those of its step and of later ones are of an earlier attempt.

    Args:
        best_metric: the metric of ``checkpoint.best``, which counts whatever its name is; None without one.
    """
    for name in line.facts:
        if is_evaluation(name) or name == best_metric:
            _forget(values.get(name, {}), line.step)
    for name, value in line.numbers().items():
        if is_evaluation(name) or name == best_metric:
            values.setdefault(name, {})[line.step] = value


def _forget(values: dict[int, float], step: int) -> None:
    """Remove the values from a step on, also where the new value is not a finite number."""
    while values and next(reversed(values)) >= step:
        values.popitem()


def _lines_with(block: bytes, needles: Sequence[bytes]) -> list[bytes]:
    """Return the lines that hold one of the needles, in their order: parsing all of a million lines takes seconds."""
    lines: dict[int, bytes] = {}
    for needle in needles:
        at = block.find(needle)
        while at >= 0:
            begin = block.rfind(b"\n", 0, at) + 1
            end = block.find(b"\n", at)
            end = len(block) if end < 0 else end
            if end - begin <= LONGEST_LINE:
                lines[begin] = block[begin:end]
            at = block.find(needle, end)
    return [lines[begin] for begin in sorted(lines)]
