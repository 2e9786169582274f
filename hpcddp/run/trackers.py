"""The trackers of a run, and how far each of them has received its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from hpcddp.packages import is_installed
from hpcddp.run.record import Record, read_record

if TYPE_CHECKING:
    from hpcddp.jobfile.sections import Trackers


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
