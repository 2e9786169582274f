"""Noise images, for tests and measurements."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hpcddp.train.randomness import GOLDEN, mix

# Images are windows into one strip of noise, with this many different offsets.
_OFFSETS = 1 << 16
_SEED = 20_240_229


def load(
    *, samples: int, val_samples: int, image_size: int, num_classes: int
) -> tuple[SyntheticImages, SyntheticImages]:
    """Return the training part and the validation part, which have other images."""
    train = SyntheticImages(samples, image_size=image_size, classes=num_classes)
    return train, SyntheticImages(val_samples, image_size=image_size, classes=num_classes, first=samples)


class SyntheticImages(Dataset[tuple[Tensor, int]]):
    """Noise images whose content and label are functions of the index; memory does not grow with their number.

    Args:
        samples: N >= 1.
        image_size: height and width.
        classes: K >= 1.
        first: the index of the first sample, which makes parts differ.
    """

    def __init__(self, samples: int, *, image_size: int, classes: int, first: int = 0) -> None:
        self.classes = range(classes)
        self._samples = samples
        self._size = image_size
        self._first = first
        generator = torch.Generator().manual_seed(_SEED)
        self._strip = torch.randn(3 * image_size * image_size + _OFFSETS, generator=generator)

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return an image ``[3, image_size, image_size]``, float32, and its label."""
        word = int(mix(np.array([index + self._first], dtype=np.uint64) * GOLDEN)[0])
        start = word % _OFFSETS
        image = self._strip[start : start + 3 * self._size * self._size]
        return image.view(3, self._size, self._size), (word >> 32) % len(self.classes)
