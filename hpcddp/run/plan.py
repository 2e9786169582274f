"""The plan of a training, ``plan.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hpcddp.run.directory import RunDirectory
from hpcddp.run.record import FORMAT, Record, read_record, write_record


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
        document: what ``hpcddp plan --json`` prints.
    """
    write_record(run.plan, PlanRecord.from_document({"format": FORMAT, **document}))
