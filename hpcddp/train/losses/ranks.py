"""Collectives for losses and metrics; without a process group there is one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function


def world_size(group: dist.ProcessGroup | None) -> int:
    """Return W, the number of processes; 1 where no process group is open."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def rank_in(group: dist.ProcessGroup | None) -> int:
    """Return this process's rank in the group; 0 where no process group is open."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def add_over_ranks(values: Tensor, group: dist.ProcessGroup | None) -> None:
    """Replace ``values``, which must be contiguous, by their sum over all ranks."""
    if dist.is_initialized():
        dist.all_reduce(values, group=group)


def gather_sizes(share: Tensor, group: dist.ProcessGroup | None) -> list[int]:
    """Return the length of every rank's share along dimension 0, in rank order."""
    sizes = torch.zeros(world_size(group), dtype=torch.int64, device=share.device)
    sizes[rank_in(group)] = len(share)
    add_over_ranks(sizes, group)
    return [int(size) for size in sizes.tolist()]


def gather_shares(share: Tensor, sizes: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    """Return the shares of all ranks, concatenated in rank order, without gradient.

    Args:
        share: this rank's share ``[n_r, ...]``.
        sizes: n_r of every rank.
        group: the process group; None = the default one.
    """
    if not dist.is_initialized():
        return share.detach()
    # all_gather needs equal shapes: short shares are padded, and the padding is removed.
    padded = share.new_zeros((max(sizes), *share.shape[1:]))
    padded[: len(share)] = share.detach()
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=group)
    return torch.cat([piece[:size] for piece, size in zip(gathered, sizes, strict=True)])


class _ScaleContext(Protocol):
    """What the forward keeps for the backward."""

    factor: float


class ScaleGradient(Function):
    """Identity whose backward multiplies the gradient by a number."""

    @staticmethod
    def forward(ctx: _ScaleContext, value: Tensor, factor: float) -> Tensor:
        """Return ``value``."""
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: _ScaleContext, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient times the factor."""
        return gradients[0] * ctx.factor, None


def scale_gradient(value: Tensor, factor: float) -> Tensor:
    """Return ``value`` with its gradient multiplied by ``factor``."""
    return value if factor == 1 else ScaleGradient.apply(value, factor)
