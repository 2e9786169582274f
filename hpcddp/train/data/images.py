"""Types of the data sets: a batch, data sets that make whole batches, and the two parts of a data set."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from hpcddp.batch.sampler import GroupTable
from hpcddp.train.data.augmentation import CROP_AND_FLIP_DRAWS, crop_and_flip
from hpcddp.train.data.keyed import KeyedPart
from hpcddp.train.randomness import SampleKeys

IMAGE_DIMENSIONS: Final = 4
"""Dimensions of a batch of images, ``[n, C, H, W]``."""

Batch: TypeAlias = tuple[Tensor, Tensor]
"""Inputs ``[n, ...]`` and integer labels ``[n]``."""


class WholeBatches(KeyedPart):
    """A data set that makes a whole batch at once, which is faster than collating samples."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return the samples at ``indices`` as one batch, without augmentation."""

    def take(self, keys: SampleKeys) -> Batch:
        """Return the samples of ``keys`` as one batch, with augmentation if the data set has any."""
        return self.__getitems__(keys.indices)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return one sample: an image ``[C, H, W]`` and its label."""
        images, labels = self.__getitems__([index])
        return images[0], int(labels[0])


class MemoryImages(WholeBatches):
    """Small images that are kept in memory as bytes and normalised per batch.

    Args:
        pixels: ``[N, C, H, W]``, uint8.
        labels: ``[N]``, int64, 0..len(classes)-1.
        classes: names of the classes.
        levels: the pixel value that stands for 1.0.
        mean: per channel, of pixels scaled to 0..1.
        std: per channel, likewise.
        crop_padding: padding of the random crops, in pixels; images are also flipped at random. None = no augmentation.
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
        crop_padding: int | None = None,
    ) -> None:
        self.classes = tuple(classes)
        self.targets = labels
        self._pixels = pixels
        self._crop_padding = crop_padding
        self._shift = torch.tensor(mean).mul_(levels).view(1, -1, 1, 1)
        self._spread = torch.tensor(std).mul_(levels).view(1, -1, 1, 1)

    def __len__(self) -> int:
        return len(self._pixels)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return normalised images ``[n, C, H, W]``, float32, and labels ``[n]``."""
        chosen = torch.as_tensor(indices)
        return self._normalise(self._pixels[chosen]), self.targets[chosen]

    def take(self, keys: SampleKeys) -> Batch:
        """Return normalised images ``[n, C, H, W]``, float32, augmented if the part is, and labels ``[n]``."""
        if self._crop_padding is None:
            return self.__getitems__(keys.indices)
        chosen = torch.as_tensor(keys.indices)
        fractions = keys.fractions(CROP_AND_FLIP_DRAWS)
        pixels = crop_and_flip(self._pixels[chosen], fractions, padding=self._crop_padding)
        return self._normalise(pixels), self.targets[chosen]

    def _normalise(self, pixels: Tensor) -> Tensor:
        return pixels.float().sub_(self._shift).div_(self._spread)


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
    """

    name: str
    train: Any
    val: Any
    classes: int
    fingerprint: str
    groups: GroupTable | None = None

    @property
    def units(self) -> int:
        """Number of units that the batch counts in the training part: groups if there are any, else samples."""
        return len(self.train) if self.groups is None else len(self.groups)

    @property
    def in_memory(self) -> bool:
        """Whether batches are made from memory, so that loader workers would only slow them down."""
        return isinstance(self.train, WholeBatches)
