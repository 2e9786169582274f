"""What a user might write, right and wrong under DDP."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def linear(num_classes: int) -> nn.Sequential:
    """Return a model that is the same on any number of ranks."""
    return nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(48, num_classes))


def with_batch_norm(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.BatchNorm1d(48), nn.Dropout(), nn.Linear(48, num_classes))


def scaled(num_classes: int) -> nn.Module:
    """Return a model that divides one gradient by the number of ranks and multiplies another one by it."""
    model = with_batch_norm(num_classes)
    weight, bias = list(model.parameters())[-2:]
    weight.register_hook(lambda gradient: gradient / dist.get_world_size())  # type: ignore[no-untyped-call]
    bias.register_hook(lambda gradient: gradient * dist.get_world_size())  # type: ignore[no-untyped-call]
    return model


def centred(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), _Centred(), nn.Linear(48, num_classes))


class _Centred(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs - inputs.mean(0)


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


class _ByRank(nn.Module):
    """Changes its own weights by rank."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body = linear(num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            next(self.body.parameters())[0, 0] += 0.01 * dist.get_rank()
        outputs: Tensor = self.body(nn.functional.dropout(inputs, 0.5, self.training))
        return outputs


def by_rank(num_classes: int) -> nn.Module:
    return _ByRank(num_classes)


class _Turning(nn.Module):
    """Has a complex weight whose gradient loses its imaginary part on all ranks but one."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3 * 8 * 8, 4, dtype=torch.complex64) / 8)
        self.head = nn.Linear(4, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        pixels = nn.functional.avg_pool2d(inputs, inputs.shape[-1] // 8).flatten(1)
        weight: Tensor = self.weight
        if dist.get_rank():
            weight = torch.complex(weight.real, weight.imag.detach())
        outputs: Tensor = self.head((pixels.to(weight.dtype) @ weight).abs())
        return outputs


def turning(num_classes: int) -> nn.Module:
    return _Turning(num_classes)


# What a module of the user's own reads when it is imported.
RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class _Scaled(nn.Module):
    """Multiplies by a number that it was made with."""

    def __init__(self, num_classes: int, factor: int) -> None:
        super().__init__()
        self.body, self.factor = linear(num_classes), factor

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.body(inputs)
        return outputs * self.factor


def by_variable(num_classes: int, name: str = "RANK") -> nn.Module:
    """Return a model that depends on a number in the environment, as far as it is there."""
    return _Scaled(num_classes, 1 + int(os.environ.get(name, "0")))


def smaller_with_more_ranks(num_classes: int) -> nn.Module:
    model = linear(num_classes)
    with torch.no_grad():
        next(model.parameters()).div_(WORLD_SIZE)
    return model


def dead(num_classes: int) -> nn.Module:
    return _Scaled(num_classes, 0)


class _Noisy(nn.Module):
    """Divides its gradient by the number of ranks, behind noise."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body = linear(num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.body(inputs + 0.1 * torch.randn_like(inputs))
        return outputs / dist.get_world_size()


def noisy(num_classes: int) -> nn.Module:
    return _Noisy(num_classes)


class _Shard(torch.utils.data.Dataset[Any]):
    """Holds every W-th sample."""

    def __init__(self, split: str) -> None:
        del split
        g = torch.Generator().manual_seed(0)
        self._images = torch.randn(128, 3, 32, 32, generator=g)[RANK::WORLD_SIZE]

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._images[index], index % 10


def shard(split: str) -> torch.utils.data.Dataset[Any]:
    return _Shard(split)


def told(num_classes: int) -> nn.Module:
    """Fail, and say what the environment tells."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "SLURM_PROCID", "SLURM_NTASKS")
    raise RuntimeError(f"{num_classes} classes, " + " ".join(f"{name}={os.environ.get(name)}" for name in names))


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


def total_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, labels, reduction="sum")


def class_weights(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, labels, weight=torch.linspace(1, 4, 10).to(logits))


def repulsion(logits: Tensor, labels: Tensor) -> Tensor:
    """Compare all samples, behind a gather without gradient."""
    parts = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, logits.detach())
    parts[dist.get_rank()] = logits
    z = nn.functional.normalize(torch.cat(parts), dim=1)
    return (z @ z.T).square().mean() + 0 * labels.sum()


class _Other(torch.utils.data.Dataset[Any]):
    def __init__(self, split: str) -> None:
        del split
        self._images = torch.randn(100, 3, 32, 32, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._images[index] + (index > 0) * dist.get_rank(), index % 10


def other_samples(split: str) -> torch.utils.data.Dataset[Any]:
    """Return noise that is other on rank 1, but for the first one."""
    return _Other(split)


def unscaled(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over this rank's own samples, declared as that of the global batch."""
    return nn.functional.cross_entropy(logits[: len(logits) // 2 + 1], labels[: len(labels) // 2 + 1])
