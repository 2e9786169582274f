"""Plan and metrics of a training (``plan.json``, ``metrics.jsonl``), and the position of each tracker in them."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from hpcddp.packages import is_installed
from hpcddp.run.directory import RunDirectory
from hpcddp.run.record import Lines, Record, read_last_bytes, read_last_lines, read_record, write_record

if TYPE_CHECKING:
    from hpcddp.jobfile.sections import Trackers


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord(Record):
    """The plan of a job that states a batch.

    Args:
        facts: all else that ``hpcddp plan --json`` prints, by name.
        steps_per_epoch: optimizer steps; None if the task counts the training data.
        total_steps: of the whole training; None like ``steps_per_epoch``.
    """

    ADVICE: ClassVar[str] = "without it the number of all steps is not known; everything else works"

    facts: Mapping[str, Any] = field(default_factory=dict)
    steps_per_epoch: int | None = None
    total_steps: int | None


def read_plan(run: RunDirectory) -> PlanRecord | None:
    """Return the plan of a run; None before there is one, and for a job that states no batch.

    Raises:
        RecordError: the record is damaged.
    """
    return read_record(run.plan, PlanRecord)


def write_plan_record(run: RunDirectory, document: Mapping[str, Any]) -> None:
    """Write the plan of a run.

    Args:
        run: the run.
        document: what ``hpcddp plan --json`` prints.
    """
    write_record(run.plan, PlanRecord.from_document(document))


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsLine(Record):
    """What was measured at a step. A function of the user's own may log what it likes.

    Args:
        step: optimizer steps done.
        time: when, in seconds since the epoch; an evaluation has no time of its own.
        facts: what was measured, by name.
    """

    ADVICE: ClassVar[str] = "its line is left out"
    IS_VERSIONED: ClassVar[bool] = False

    step: int
    time: float | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    def number(self, name: str) -> float | None:
        """Return a measured number; None if it was not measured, or is no number."""
        value = self.facts.get(name)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    def as_json(self) -> dict[str, Any]:
        """Return the line as a JSON object."""
        return {"step": self.step, **({} if self.time is None else {"time": self.time}), **self.facts}


def lines_until(content: bytes, *, step: int, evaluated_step: int) -> bytes:
    """Return the lines of a log of metrics up to a step; damaged lines and a torn last one are left out.

    A resumed run may have a million lines, so each is only parsed; ``MetricsLine`` checks the rest where it is read.

    Args:
        content: the whole log.
        step: the last step that is kept.
        evaluated_step: the step of the last evaluation that is kept.
    """
    kept = []
    for line in content.split(b"\n"):
        try:
            record = json.loads(line)
            last = evaluated_step if "val_samples" in record else step
            is_kept = type(record) is dict and type(record["step"]) is int and record["step"] <= last
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
        if is_kept:
            kept.append(line + b"\n")
    return b"".join(kept)


def read_metrics(path: Path, size: int) -> Lines[MetricsLine]:
    """Return the last lines of a run's metrics.

    Args:
        path: its ``metrics.jsonl``; it need not exist.
        size: how many bytes are read at most.

    Raises:
        RecordError: it cannot be read.
    """
    return read_last_lines(path, MetricsLine, size)


_LINES_AT_ONCE: Final = 5000
_KEYS: Final = frozenset({"step", "time"})


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsColumns:
    """All lines of a log of metrics, a column for each name; NaN where a line has no such number.

    Args:
        steps: optimizer steps done, for each line.
        times: when, in seconds since the epoch.
        values: the numbers, by name.
        damaged: how many lines are left out, because they are no lines of metrics.
    """

    steps: array[float]
    times: array[float]
    values: Mapping[str, array[float]]
    damaged: int = 0

    @classmethod
    def empty(cls) -> Self:
        """Return the columns of a log without lines."""
        return cls(steps=array("d"), times=array("d"), values={})


def read_columns(path: Path) -> MetricsColumns:
    """Return the numbers in a run's metrics; ten times as fast as ``read_metrics``, which checks each line by itself.

    Args:
        path: its ``metrics.jsonl``; it need not exist.

    Raises:
        RecordError: it cannot be read.
    """
    lines = read_last_bytes(path).split(b"\n")
    # The last one may still be being written.
    damaged = -1 if lines[-1].strip() and not _documents(lines[-1:]) else 0
    steps, times = array("d"), array("d")
    values: dict[str, array[float]] = {}
    for first in range(0, len(lines), _LINES_AT_ONCE):
        block = [line for line in lines[first : first + _LINES_AT_ONCE] if line.strip()]
        documents = _documents(block)
        damaged += len(block) - len(documents)
        before = len(steps)
        steps.extend(float(document["step"]) for document in documents)
        times.extend([_number(document.get("time")) for document in documents])
        for name in set().union(*documents) - _KEYS:
            column = values.setdefault(name, array("d", [math.nan]) * before)
            column.extend([_number(document.get(name)) for document in documents])
        for column in values.values():
            column.extend([math.nan] * (len(steps) - len(column)))
    numbers = {name: values[name] for name in sorted(values) if not all(map(math.isnan, values[name]))}
    return MetricsColumns(steps=steps, times=times, values=numbers, damaged=damaged)


def _documents(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """Return the lines that are lines of metrics; all at once if all of them are JSON."""
    try:
        documents = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        documents = []
    if len(documents) != len(lines):
        documents = []
        for line in lines:
            with suppress(ValueError, RecursionError):
                documents.append(json.loads(line))
    return [one for one in documents if type(one) is dict and type(one.get("step")) is int and one["step"] < _LARGEST]


_LARGEST: Final = 1 << 53


def _number(value: object) -> float:
    """Return a finite number of a line, NaN for everything else."""
    if type(value) is float:
        return value if math.isfinite(value) else math.nan
    return float(value) if type(value) is int and abs(value) < _LARGEST else math.nan


PACKAGES: Mapping[str, str] = MappingProxyType(
    {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny"}
)
"""The smallest package that a tracker needs."""


def chosen(trackers: Trackers) -> tuple[str, ...]:
    """Return the trackers of a job: the named ones, or TensorBoard where this Python has it."""
    if trackers.use is not None:
        return trackers.use
    return ("tensorboard",) if is_installed("tensorboard") else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerPosition(Record):
    """What was sent to a tracker.

    Args:
        run_id: what the tracker calls the run; None before it has returned a name.
        step: the last step that was sent; -1 before the first.
        evaluated_step: the step of the last evaluation that was sent; -1 before the first.
    """

    ADVICE: ClassVar[str] = "all steps of the run are sent to the tracker again"

    run_id: str | None = None
    step: int = -1
    evaluated_step: int = -1


def read_position(path: Path) -> TrackerPosition:
    """Return what was sent to a tracker: nothing where there is no file.

    Raises:
        RecordError: the record is damaged.
    """
    return read_record(path, TrackerPosition) or TrackerPosition()


def write_position(path: Path, position: TrackerPosition) -> None:
    """Write what was sent to a tracker."""
    write_record(path, position)
