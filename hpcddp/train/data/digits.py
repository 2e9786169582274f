"""scikit-learn's handwritten digits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hpcddp.packages import require_folder

_EDGE = 8
_SCALE = 4  # 8 x 8 pixels become 32 x 32
_LEVELS = 16
# Of the training part.
_MEAN = 0.3052
_STD = 0.3763
_VALIDATION_STRIDE = 5


class Digits(Dataset[tuple[Tensor, int]]):
    """A part of the digits, in memory.

    Args:
        images: ``[N, 3, 32, 32]``, normalised.
        labels: ``[N]``.
    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images
        self.targets = labels
        self.classes = range(10)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return an image and its label."""
        return self.images[index], int(self.targets[index])


def load() -> tuple[Digits, Digits]:
    """Return the training part (1,437 images) and the validation part (every fifth image, 360), as 3 x 32 x 32."""
    folder = require_folder("train.dataset: digits", "sklearn")
    # The import of scikit-learn, whose load_digits reads the same file, takes half as long as that of torch.
    table = torch.from_numpy(np.loadtxt(folder / "datasets" / "data" / "digits.csv.gz", delimiter=","))
    labels = table[:, -1].long()
    small = table[:, :-1].reshape(-1, 1, _EDGE, _EDGE).float()
    small.sub_(torch.tensor(_MEAN).mul_(_LEVELS)).div_(torch.tensor(_STD).mul_(_LEVELS))
    # Repeating pixels is exact, so every host has the same bytes.
    large = small.repeat_interleave(_SCALE, dim=2).repeat_interleave(_SCALE, dim=3)
    images = large.expand(-1, 3, -1, -1).contiguous()
    held_out = torch.arange(len(labels)) % _VALIDATION_STRIDE == 0
    return Digits(images[~held_out], labels[~held_out]), Digits(images[held_out], labels[held_out])
