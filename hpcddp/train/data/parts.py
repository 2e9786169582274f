"""Types of the data sets: batches, the training and the validation part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from hpcddp.batch.sampler import GroupTable

MicroBatch: TypeAlias = tuple[Tensor, Tensor]
"""Inputs ``[n, ...]`` and integer labels ``[n]``."""


class MapStyle(Protocol):
    """A map-style data set of PyTorch: a length, and samples by their index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


def unchanged(inputs: Tensor) -> Tensor:
    """Return the inputs."""
    return inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The training and validation parts of a data set.

    Args:
        name: as the job file has it.
        train: the training part, map-style.
        val: the validation part, map-style.
        classes: K, number of classes.
        fingerprint: hex digest that identifies the training data.
        groups: groups of the training samples if the batch counts groups; None = it counts samples.
        to_inputs: makes inputs of a model of the batched inputs of samples, on the device they are on. Images of a
            folder leave the loader processes as bytes.
    """

    name: str
    train: Any
    val: Any
    classes: int
    fingerprint: str
    groups: GroupTable | None = None
    to_inputs: Callable[[Tensor], Tensor] = unchanged

    @property
    def units(self) -> int:
        """Number of units that the batch counts in the training part: groups if there are any, else samples."""
        return len(self.train) if self.groups is None else len(self.groups)
