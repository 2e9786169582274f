"""Models and data sets of a user, for the trainings of the tests."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from hpcddp.train.data.builtin import load_digits

SLOW_S = 0.02


class FewDigits(Dataset[Any]):
    """The first digits of a part, as double or single precision images."""

    def __init__(self, split: str, samples: int, *, first: int, poison: int | None) -> None:
        train, val = load_digits()
        part = train if split == "train" else val
        chosen = slice(first, first + samples)
        self._images, self.labels = part.images[chosen].clone(), part.targets[chosen]
        if poison is not None and split == "train":
            self._images[poison] = torch.nan

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._images[index], int(self.labels[index])


def few_digits(split: str, train: int = 100, val: int = 50, first: int = 0, poison: int | None = None) -> FewDigits:
    """Return the first digits of a part; the images of sample ``poison`` are not a number."""
    return FewDigits(split, train if split == "train" else val, first=first, poison=poison)


class SlowDigits(FewDigits):
    """Digits of which each takes rank 1 a moment longer."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if dist.get_rank() == 1:
            time.sleep(SLOW_S)
        return super().__getitem__(index)


def slow_digits(split: str) -> SlowDigits:
    return SlowDigits(split, 100 if split == "train" else 50, first=0, poison=None)


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


class _ComplexModel(nn.Module):
    """A model with a complex parameter and complex buffers, or with the same numbers in pairs of real ones."""

    def __init__(self, num_classes: int, *, pairs: bool) -> None:
        super().__init__()
        self._pairs = pairs
        angles = torch.arange(8.0)
        self.weight = nn.Parameter(self._stored(torch.randn(3 * 8 * 8, 8, 2) / 8))
        self.register_buffer("turns", self._stored(torch.stack([angles.cos(), angles.sin()], dim=1)))
        self.register_buffer("seen", self._stored(torch.zeros(8, 2)))
        self.head = nn.Linear(8, num_classes)

    def _stored(self, numbers: Tensor) -> Tensor:
        return numbers if self._pairs else torch.view_as_complex(numbers)

    def _complex(self, stored: Tensor) -> Tensor:
        return torch.view_as_complex(stored) if self._pairs else stored

    def forward(self, inputs: Tensor) -> Tensor:
        pixels = nn.functional.avg_pool2d(inputs, 4).flatten(1)
        weight = self._complex(self.weight)
        values = pixels.to(weight.dtype) @ weight * self._complex(self.get_buffer("turns"))
        if self.training:
            # Differs between the ranks.
            self._complex(self.get_buffer("seen")).add_(values.detach().sum(dim=0))
        outputs: Tensor = self.head(torch.tanh(values.real) * values.imag)
        return outputs


def complex_model(num_classes: int, *, pairs: bool = False) -> nn.Module:
    """Return a model that computes in complex numbers; its own are in pairs of real ones if asked for."""
    return _ComplexModel(num_classes, pairs=pairs)


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
