"""Losses that keep something from call to call."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor, nn
from torch.nn import functional


class Centred(nn.Module):
    """With a running centre in a buffer, as DINO's."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(1, 10), persistent=False)

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        loss = functional.cross_entropy(outputs - self.centre.to(outputs), labels)
        self.centre.mul_(0.9).add_(outputs.detach().mean(0, keepdim=True).to(self.centre), alpha=0.1)
        return loss


class Queued(nn.Module):
    """With a queue of earlier outputs in an attribute, as MoCo's."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: deque[Tensor] = deque(maxlen=64)

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        shift = torch.stack(list(self.queue)).mean() if self.queue else outputs.new_zeros(())
        self.queue.extend(outputs.detach().mean(1))
        return functional.cross_entropy(outputs, labels) + (outputs.mean() - shift) ** 2


class Counting:
    """An object with running class counts."""

    def __init__(self) -> None:
        self.counts = torch.ones(10)

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        self.counts = self.counts + torch.bincount(labels, minlength=10)
        return functional.cross_entropy(outputs, labels, weight=(1 / self.counts).to(outputs))


class Logging(nn.Module):
    """Remembers its last value for a log, which changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.last = 0.0

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        loss = functional.cross_entropy(outputs, labels)
        self.last = float(loss)
        return loss


class Fixed(nn.Module):
    """With a buffer that stays as it is."""

    weights: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.linspace(0.5, 1.5, 10))

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        losses = functional.cross_entropy(outputs, labels, reduction="none")
        return (losses * self.weights.to(outputs)[labels]).mean()


class FirstSeen:
    """Begins its centre with what it sees first."""

    def __init__(self) -> None:
        self.centre: Tensor | None = None

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        mean = outputs.detach().mean(0)
        self.centre = mean if self.centre is None else (self.centre + mean) / 2
        return functional.cross_entropy(outputs - self.centre, labels)


_centred = Centred()


def behind_a_function(outputs: Tensor, labels: Tensor) -> Tensor:
    """Keep the centre in an object that the function calls."""
    loss: Tensor = _centred(outputs, labels)
    return loss


_calls = 0


def in_a_global(outputs: Tensor, labels: Tensor) -> Tensor:
    """Weight the loss by the number of calls."""
    global _calls  # noqa: PLW0603  the state that is to be found
    _calls += 1
    return functional.cross_entropy(outputs, labels) * min(1.0, _calls / 100)
