"""Collectives for losses and metrics, and the gather with gradient; without a process group there is one rank."""

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


class _GatherContext(Protocol):
    """What the forward keeps for the backward."""

    sizes: Sequence[int]
    group: dist.ProcessGroup | None


class _Gather(Function):
    @staticmethod
    def forward(ctx: _GatherContext, share: Tensor, sizes: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return gather_shares(share, sizes, group)

    @staticmethod
    def backward(ctx: _GatherContext, *gradients: Tensor) -> tuple[Tensor, None, None]:
        summed = gradients[0].clone(memory_format=torch.contiguous_format)
        add_over_ranks(summed, ctx.group)
        rank = rank_in(ctx.group)
        return summed.narrow(0, sum(ctx.sizes[:rank]), ctx.sizes[rank]), None, None


def gather_with_grad(
    share: Tensor, *, sizes: Sequence[int] | None = None, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return the outputs of all ranks, in rank order, on every rank; the backward sums over ranks.

    Every rank then computes the full loss F of the global batch, *with no factor*::

        image, text = gather_with_grad(image), gather_with_grad(text)
        loss = contrastive(image, text, model.module.temperature)

    This is exact: rank r holds the outputs z_r, and every rank computes F(z_0 .. z_{W-1}, tau). The backward of the
    gather sums the gradients of the W ranks for z_r: W * dF/dz_r. DDP divides by W (batch contract, section 0), giving
    ``sum over r of dF/dz_r * dz_r/dparameters``, the gradient of F. A parameter that F uses directly, such as a
    temperature, gets dF/dtau on every rank, and the mean of W equal numbers is that number. A gather whose backward
    only takes the rank's own slice gives 1/W of the encoder's gradient but all of the temperature's: no factor on the
    loss or on the learning rate corrects both.

    Shares may be uneven or empty; an empty share passes ``outputs[:0]``. With accumulation use ``accumulate_gathered``.

    Args:
        share: this rank's outputs ``[n_r, ...]``; all dimensions but the first are the same on every rank. Labels,
            which have no gradient, can be gathered too.
        sizes: n_r of every rank if known, such as ``plan.per_rank_samples``; None = gathered by one more collective.
        group: the process group; None = the default one, or one process where none is open.

    Returns:
        ``[sum of n_r, ...]``, the same on every rank: the order of the global batch.
    """
    if not dist.is_initialized():
        return share
    known = gather_sizes(share, group) if sizes is None else list(sizes)
    gathered: Tensor = _Gather.apply(share, known, group)
    return gathered
