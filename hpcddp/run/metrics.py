"""Plan and metrics of a training (``plan.json``, ``metrics.jsonl``), and the position of each tracker in them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from hpcddp.packages import is_installed
from hpcddp.run.directory import RunDirectory
from hpcddp.run.record import Lines, Record, read_last_lines, read_record, write_record

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
