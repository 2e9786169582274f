"""What a user might write: models and data sets for the tests' trainings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from hpcddp.train.data.digits import load_digits


class FewDigits(Dataset[Any]):
    """The first digits of a part, as double or single precision images."""

    def __init__(self, split: str, samples: int, *, first: int, poison: int | None) -> None:
        train, val = load_digits()
        part = train if split == "train" else val
        self._images, self.labels = part.__getitems__(range(first, first + samples))
        if poison is not None and split == "train":
            self._images[poison] = torch.nan

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._images[index], int(self.labels[index])


def few_digits(split: str, train: int = 100, val: int = 50, first: int = 0, poison: int | None = None) -> FewDigits:
    """Return the first digits of a part; the images of sample ``poison`` are not a number."""
    return FewDigits(split, train if split == "train" else val, first=first, poison=poison)


def linear_model(num_classes: int, hidden: int = 16) -> nn.Module:
    """Return a model without BatchNorm and without dropout."""
    return nn.Sequential(
        nn.AvgPool2d(4), nn.Flatten(), nn.Linear(3 * 8 * 8, hidden), nn.Tanh(), nn.Linear(hidden, num_classes)
    )


def norm_model(num_classes: int) -> nn.Module:
    """Return a model with BatchNorm and dropout."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=4),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(4 * 8 * 8, num_classes),
    )
