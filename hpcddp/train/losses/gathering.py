"""Gather outputs over ranks with the exact gradient, for losses that compare samples with each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from hpcddp.train.losses.ranks import add_over_ranks, gather_shares, gather_sizes, rank_in


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
