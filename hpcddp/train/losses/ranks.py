"""Collectives for losses and metrics, and the gather with gradient; without a process group there is one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from hpcddp.train import distributed
from hpcddp.train.errors import LossError


def add_over_ranks(values: Tensor, group: dist.ProcessGroup | None) -> None:
    """Replace ``values``, which must be contiguous, by their sum over all ranks."""
    if dist.is_initialized():
        dist.all_reduce(values, group=group)


def _rows_of_ranks(share: object, sizes: Sequence[int] | None, group: dist.ProcessGroup | None) -> list[int]:
    """Return the rows of every rank's share, in rank order.

    Args:
        sizes: as the caller knows them; None = the ranks tell each other, in one collective.

    Raises:
        LossError: the share cannot be gathered, or has not as many rows as the sizes say.
    """
    if not isinstance(share, Tensor):
        raise LossError("what is to be gathered is no tensor; give the outputs of the model, [n, ...]")
    if share.dim() == 0:
        raise LossError(
            "what is to be gathered is a scalar, and a gather needs one row for each sample; give the outputs [n, ...] "
            "before they are reduced (numbers are added over ranks by additive_loss)"
        )
    world_size = distributed.world_size(group)
    rank = distributed.rank(group)
    if sizes is None:
        rows = torch.zeros(world_size, dtype=torch.int64, device=share.device)
        rows[rank] = len(share)
        add_over_ranks(rows, group)
        return [int(size) for size in rows.tolist()]
    if len(sizes) != world_size:
        raise LossError(
            f"sizes holds {len(sizes)} numbers, and there are {world_size} ranks; give the samples of every rank, in "
            "rank order, or leave sizes out"
        )
    if sizes[rank] != len(share):
        raise LossError(
            f"sizes holds {sizes[rank]} for rank {rank}, which gives {len(share)} rows; give the samples of this very "
            "step, of every rank (the last one of an epoch may be smaller), or leave sizes out"
        )
    return list(sizes)


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
    shares = [rows[:size] for rows, size in zip(gathered, sizes, strict=True)]
    return torch.cat(shares)


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
    if factor == 1:
        return value
    scaled: Tensor = ScaleGradient.apply(value, factor)
    return scaled


class _GatherContext(Protocol):
    """What the forward keeps for the backward."""

    sizes: Sequence[int]
    group: dist.ProcessGroup | None


class _Gather(Function):
    @staticmethod
    def forward(ctx: _GatherContext, share: Tensor, sizes: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
        ctx.sizes = sizes
        ctx.group = group
        return gather_shares(share, sizes, group)

    @staticmethod
    def backward(ctx: _GatherContext, *gradients: Tensor) -> tuple[Tensor, None, None]:
        summed = gradients[0].clone(memory_format=torch.contiguous_format)
        add_over_ranks(summed, ctx.group)
        rank = distributed.rank(ctx.group)
        begin = sum(ctx.sizes[:rank])
        return summed[begin : begin + ctx.sizes[rank]], None, None


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

    Shares may be uneven or empty; an empty share passes ``outputs[:0]``. There is one backward in a step: with
    accumulation, no call has the outputs of the whole batch.

    Args:
        share: this rank's outputs ``[n_r, ...]``; all dimensions but the first are the same on every rank. Labels,
            which have no gradient, can be gathered too.
        sizes: n_r of every rank if known, such as ``plan.per_rank_samples``: a GPU is then not waited for; the same on
            every rank. None = the ranks tell each other.
        group: the process group; None = the default one, or one process where none is open.

    Returns:
        ``[sum of n_r, ...]``, the same on every rank: the order of the global batch.

    Raises:
        LossError: the share is no tensor with rows, or not of the size that ``sizes`` says.
    """
    rows = _rows_of_ranks(share, sizes, group)
    if not dist.is_initialized():
        return share
    gathered: Tensor = _Gather.apply(share, rows, group)
    return gathered
