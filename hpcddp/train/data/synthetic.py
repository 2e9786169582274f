"""Noise images, for tests and measurements."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hpcddp.train.data.parts import MicroBatch, WholeBatches
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


class SyntheticImages(WholeBatches):
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

    def __getitems__(self, indices: Sequence[int]) -> MicroBatch:
        """Return images ``[n, 3, image_size, image_size]``, float32, and labels ``[n]``."""
        words = mix((np.asarray(indices, dtype=np.uint64) + np.uint64(self._first)) * GOLDEN)
        pixels = 3 * self._size * self._size
        images = [self._strip[start : start + pixels] for start in (words % np.uint64(_OFFSETS)).tolist()]
        labels = (words >> np.uint64(32)) % np.uint64(len(self.classes))
        return torch.stack(images).view(-1, 3, self._size, self._size), torch.from_numpy(labels.astype(np.int64))
