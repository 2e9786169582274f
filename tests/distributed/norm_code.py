"""Models for the tests' trainings whose statistics, buffers or parameters are not those of every model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def norm_net(num_classes: int) -> nn.Module:
    """Return a model with BatchNorm of maps and of vectors, without dropout."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=4),
        nn.BatchNorm2d(4),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(4 * 8 * 8, 12),
        nn.BatchNorm1d(12, momentum=None),
        nn.Tanh(),
        nn.Linear(12, num_classes),
    )


class Counting(nn.Module):
    """A model with a buffer of its own, which differs between ranks."""

    seen: Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.net = norm_net(num_classes)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Any:
        if self.training:
            self.seen += inputs.mean()
        return self.net(inputs)


class Halves(nn.Module):
    """A model that uses half of its parameters only for samples that are bright."""

    def __init__(self, num_classes: int, *, says_so: bool) -> None:
        super().__init__()
        self.dark, self.bright = nn.Linear(3 * 32 * 32, num_classes), nn.Linear(3 * 32 * 32, num_classes)
        self.find_unused_parameters = says_so
        self._calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        flat = inputs.flatten(1)
        outputs: Tensor = self.dark(flat)
        self._calls += 1
        # Whatever is tried before the training uses everything.
        bright = (flat.mean(dim=1) > 0.0) | (self._calls < 4)
        if bright.any():
            outputs = outputs.index_add(0, bright.nonzero()[:, 0], self.bright(flat[bright]))
        return outputs


def counting(num_classes: int) -> nn.Module:
    return Counting(num_classes)


def halves(num_classes: int, *, says_so: bool) -> nn.Module:
    return Halves(num_classes, says_so=says_so)


def own_forward(num_classes: int) -> nn.Module:
    class Own(nn.BatchNorm1d):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            return input

    return nn.Sequential(nn.Flatten(), Own(3 * 32 * 32), nn.Linear(3 * 32 * 32, num_classes))


def drifting(num_classes: int) -> nn.Module:
    """Return a model whose weight drifts on rank 1, a little in each forward."""

    class Drifting(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            if torch.distributed.get_rank() == 1:
                with torch.no_grad():
                    self.bias[0] += 1e-12
            return super().forward(input.flatten(1))

    return Drifting(3 * 32 * 32, num_classes)
