"""What a user might write: models and data sets for the tests' trainings."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
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


class RecordedDigits(FewDigits):
    """Digits that write down which of them this rank takes, in order."""

    def __init__(self, split: str, samples: int, *, record: Path) -> None:
        super().__init__(split, samples, first=0, poison=None)
        self._record = record

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with self._record.open("a") as file:
            file.write(f"{index}\n")
        return super().__getitem__(index)


def recorded_digits(split: str, record: str) -> FewDigits:
    """Return 203 digits; every rank adds the indices of those that it trains on to ``RECORD/rank-N``."""
    if split == "val":
        return FewDigits(split, 50, first=0, poison=None)
    Path(record).mkdir(parents=True, exist_ok=True)
    return RecordedDigits(split, 203, record=Path(record) / f"rank-{dist.get_rank()}")


class NoisyDigits(FewDigits):
    """Digits with noise from each of the generators that transforms draw from."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = super().__getitem__(index)
        noise = random.random() + np.random.random() + torch.rand(())  # noqa: NPY002
        return image + noise * torch.randn_like(image), label


def noisy_digits(split: str) -> FewDigits:
    """Return 50 digits of a part with random noise."""
    return NoisyDigits(split, 50, first=0, poison=None)
