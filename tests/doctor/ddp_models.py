"""What a user might write, right and wrong under DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcddp.train.data.digits import load_digits


def linear(num_classes: int) -> nn.Sequential:
    """Return a model that is the same on any number of ranks."""
    return nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(48, num_classes))


def with_batch_norm(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.BatchNorm1d(48), nn.Dropout(), nn.Linear(48, num_classes))


def _scale(layer: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    for parameter in layer.parameters():
        parameter.register_hook(change)  # type: ignore[no-untyped-call]


def divided(num_classes: int) -> nn.Module:
    model = linear(num_classes)
    _scale(model[2], lambda gradient: gradient / dist.get_world_size())
    return model


def multiplied(num_classes: int) -> nn.Module:
    model = linear(num_classes)
    _scale(model, lambda gradient: gradient * dist.get_world_size())
    return model


def centred(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), _Centred(), nn.Linear(48, num_classes))


class _Centred(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs - inputs.mean(0)


def initialised_by_rank(num_classes: int) -> nn.Module:
    model = linear(num_classes)
    with torch.no_grad():
        next(model.parameters()).mul_(1 + dist.get_rank())
    return model


class _Gated(nn.Module):
    """Leaves a layer out on rank 1."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body, self.last = linear(num_classes), nn.Linear(num_classes, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.body(inputs)
        return outputs if dist.get_rank() == 1 else outputs + self.last(outputs)


def gated(num_classes: int) -> nn.Module:
    return _Gated(num_classes)


class _Drifting(nn.Module):
    """Changes its own weights in the forward, by rank."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body = linear(num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            next(self.body.parameters())[0, 0] += 0.01 * dist.get_rank()
        outputs: Tensor = self.body(inputs)
        return outputs


def drifting(num_classes: int) -> nn.Module:
    return _Drifting(num_classes)


class _Seeding(nn.Module):
    """Draws the same dropout masks on every rank, by a seed of its own that only steps count."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body, self.calls = linear(num_classes), 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        torch.manual_seed(self.calls)
        outputs: Tensor = self.body(nn.functional.dropout(inputs, 0.5, self.training))
        return outputs


def seeding(num_classes: int) -> nn.Module:
    return _Seeding(num_classes)


class _Stubborn(nn.Module):
    """Takes single precision and no other."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body = linear(num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.dtype is not torch.float32:
            raise TypeError("float32 alone")
        outputs: Tensor = self.body(inputs)
        return outputs


def stubborn(num_classes: int) -> nn.Module:
    return _Stubborn(num_classes)


def broken(num_classes: int) -> nn.Module:
    raise RuntimeError(f"no model of {num_classes} classes today")


class _Other(torch.utils.data.Dataset[Any]):
    def __init__(self, split: str) -> None:
        self._part = load_digits()[split == "val"]

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        images, labels = self._part.__getitems__([index])
        return images[0] + (index > 0) * dist.get_rank(), int(labels[0])


def other_samples(split: str) -> torch.utils.data.Dataset[Any]:
    """Return digits that are others on rank 1, but for the first one."""
    return _Other(split)
