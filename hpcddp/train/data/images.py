"""The shapes that data sets come in: batches of images and labels, whole or sample by sample."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import Dataset

Batch: TypeAlias = tuple[Tensor, Tensor]
"""Inputs ``[n, ...]`` and integer labels ``[n]``."""


class WholeBatches(Dataset[Any], ABC):
    """A data set that makes a batch in one go, which is far quicker than sample by sample."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return the samples at ``indices`` as one batch."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return one sample: an image ``[C, H, W]`` and its label."""
        images, labels = self.__getitems__([index])
        return images[0], int(labels[0])


class MemoryImages(WholeBatches):
    """Small images that stay in memory as bytes and are normalised when a batch is taken.

    Args:
        pixels: ``[N, C, H, W]``, uint8.
        labels: ``[N]``, int64, 0..len(classes)-1.
        classes: names of the classes.
        levels: the pixel value that means 1.0.
        mean: per channel, of pixels scaled to 0..1.
        std: per channel, likewise.
    """

    def __init__(
        self,
        pixels: Tensor,
        labels: Tensor,
        *,
        classes: Sequence[str],
        levels: int,
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None:
        self.classes = tuple(classes)
        self.targets = labels
        self._pixels = pixels
        self._shift = torch.tensor(mean).mul_(levels).view(1, -1, 1, 1)
        self._spread = torch.tensor(std).mul_(levels).view(1, -1, 1, 1)

    def __len__(self) -> int:
        return len(self._pixels)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return normalised images ``[n, C, H, W]``, float32, and labels ``[n]``."""
        chosen = torch.as_tensor(indices)
        return self._pixels[chosen].float().sub_(self._shift).div_(self._spread), self.targets[chosen]


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The training and validation parts of a data set.

    Args:
        name: as the job file has it.
        train: the training part, map-style.
        val: the validation part, map-style.
        classes: K, how many classes the model tells apart.
        fingerprint: hex digest of what identifies the training data.
    """

    name: str
    train: Any
    val: Any
    classes: int
    fingerprint: str

    @property
    def in_memory(self) -> bool:
        """Whether a batch is made in one go from memory, so that loader workers would only cost."""
        return isinstance(self.train, WholeBatches)
