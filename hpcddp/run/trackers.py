"""Trackers of a run: which ones a Python installation has, and what each has been told (``trackers/<name>.json``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from hpcddp.jobfile.sections import Trackers
from hpcddp.run.record import Record, read_record, write_record

PACKAGES: Mapping[str, str] = MappingProxyType(
    {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny"}
)
"""The smallest package that a tracker needs."""


def is_installed(name: str) -> bool:
    """Return whether this Python has a tracker's package; imports nothing.

    A folder of that name, such as the ``wandb/`` that W&B leaves behind, is no package.
    """
    found = find_spec(name)
    return found is not None and found.origin is not None


def chosen(trackers: Trackers) -> tuple[str, ...]:
    """Return the trackers of a job: the named ones, or TensorBoard where this Python has it."""
    if trackers.use is not None:
        return trackers.use
    return ("tensorboard",) if is_installed("tensorboard") else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerMemory(Record):
    """What a tracker has been told of a run.

    Args:
        run_id: what the tracker calls the run; None before it has said so.
        step: the last step that it was told; -1 before the first.
        evaluated_step: the step of the last evaluation that it was told; -1 before the first.
    """

    ADVICE: ClassVar[str] = "the tracker is told of the run from its beginning"

    run_id: str | None = None
    step: int = -1
    evaluated_step: int = -1


def read_memory(path: Path) -> TrackerMemory:
    """Return what a tracker has been told, which is nothing where there is no file.

    Raises:
        RecordError: the record is damaged.
    """
    return read_record(path, TrackerMemory) or TrackerMemory()


def write_memory(path: Path, memory: TrackerMemory) -> None:
    """Write what a tracker has been told."""
    write_record(path, memory)
