"""What may differ between the job of a run and the job that goes on with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from hpcddp.spec.job import JobSpec

MOVABLE: Final = frozenset(
    {
        "run_root",
        "profile",
        "resources",
        "environment",
        "launch",
        "requeue",
        "checkpoint",
        "batch.max_per_device_batch_size",
        "batch.grad_accum_steps",
        "batch.split",
        "train.data_dir",
        "train.device",
        "train.num_workers",
    }
)
"""Where and how fast a training runs, and how it is cut into ranks and micro-steps: batch contract, section 6."""


def training_changes(before: JobSpec, now: JobSpec) -> Iterator[tuple[str, Any, Any]]:
    """Yield what would make another training of it: the key, its value before, and the one now.

    Args:
        before: the job that the run had.
        now: the job that wants to go on with it.
    """
    yield from _changes(before.model_dump(mode="json"), now.model_dump(mode="json"), "")


def _changes(before: Mapping[str, Any], now: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any, Any]]:
    for name, value in now.items():
        key = f"{above}{name}"
        if key in MOVABLE or before.get(name) == value:
            continue
        if isinstance(value, Mapping) and isinstance(before.get(name), Mapping):
            yield from _changes(before[name], value, f"{key}.")
        else:
            yield key, before.get(name), value
