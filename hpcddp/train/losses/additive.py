"""Losses that are functions of sums over samples, exact for every split of the global batch.

With gradient accumulation they take two passes over the micro-batches: the first one, without gradient, computes what
the second one needs before its first backward. Both use the same random numbers (dropout masks), and running statistics
are updated once. The two passes cost one more forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpcddp.train import distributed
from hpcddp.train.buffers import buffers_restored
from hpcddp.train.errors import LossError, describe
from hpcddp.train.losses.ranks import add_over_ranks, scale_gradient


def weighted_mean(
    total: Tensor,
    count: Tensor | None = None,
    *,
    global_count: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return the loss ``sum / count`` of the global batch, to call ``backward`` on under DDP.

    For losses that are divided by something other than the number of samples: tokens that are not padding, pixels
    that are not ignored, class weights, positives. DDP averages over ranks (batch contract, section 0):
    ``gradient = (1/W) sum over r, a of grad L[r,a]``. The loss of the global batch is ``sum of s[r,a] / C`` with ``C``
    the count over all ranks and micro-steps. So ``L[r,a] = W * s[r,a] / C`` is exact, and ``s[r,a] / c[r,a]`` is not,
    unless all counts are equal.

    Without accumulation::

        loss = weighted_mean(losses[kept].sum(), kept.sum())

    With accumulation the count of all micro-batches must be known before the first backward; it needs no forward::

        (tokens,) = sum_statistics([(targets != PADDING).sum()] for _, targets in micro_batches)
        for inputs, targets in micro_batches:  # all but the last inside no_sync
            weighted_mean(token_losses(inputs, targets).sum(), global_count=tokens).backward()

    An empty share passes a sum over no samples, ``outputs[:0].sum()``: it counts 0 and keeps the collectives matched.

    Args:
        total: the sum of weighted losses of this rank's micro-batch, a scalar.
        count: what that sum is divided by (sum of weights, number of tokens), a scalar, where A = 1; it may have a
            gradient.
        global_count: in its place where A > 1: the count over all ranks and micro-steps, from ``sum_statistics``.
        group: the process group; None = the default one, or one process where none is open.

    Returns:
        A float64 scalar. With ``count`` its value is the loss of the global batch, the same on every rank. With
        ``global_count`` it is L[r,a]: the mean over ranks of the sum over micro-steps is the loss of the global batch.

    Raises:
        LossError: not exactly one of ``count`` and ``global_count`` is given, or one is not a real scalar tensor.
    """
    if count is not None and global_count is None:
        _check_scalars(total, count)
        totals = sum_statistics([(total, count)], group=group)
        return _loss_of_sums(torch.div, (total, count), totals, group)
    if global_count is not None and count is None:
        _check_statistics([(total,)])
        _check_scalars(total)
        return total.double() * distributed.world_size(group) / global_count
    given = "neither count nor" if count is None else "both count and"
    raise LossError(
        f"weighted_mean got {given} global_count; give count "
        "where a rank makes one backward per step, global_count where it makes several"
    )


def additive_loss(
    function: Callable[..., Tensor],
    *statistics: Tensor,
    totals: Sequence[Tensor] | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return the loss ``function(sums over the global batch)``, to call ``backward`` on under DDP.

    It makes many losses exact: batch Dice and IoU, class-weighted cross entropy, token means, correlation, Barlow
    Twins. The loss of the global batch is ``f(S)`` with ``S = sum of s[r,a]``, so its gradient is ``f'(S) * sum over r,
    a of grad s[r,a]``. DDP computes ``(1/W) sum over r, a of grad L[r,a]`` (batch contract, section 0). With::

        L[r,a] = W * f(S + s[r,a] - stopgrad(s[r,a]))

    the argument of f has the value S and the gradient of s[r,a], so that both are equal, under any split. S is summed
    over ranks without gradient, in float64.

    Without accumulation::

        loss = additive_loss(lambda both, either: 1 - both / either, intersection.sum(), union.sum())

    With accumulation S must be known before the first backward, and it needs the outputs of every micro-batch: two
    passes, which ``accumulate_additive`` makes. An empty share passes sums over no samples, ``outputs[:0].sum()``.

    Args:
        function: f; takes as many float64 tensors as there are statistics, in their shapes, returns a scalar.
        statistics: s[r,a], sums over the samples of this rank's micro-batch; any shapes, the same on every rank. The
            number of samples is one too, if f needs it.
        totals: S where A > 1, from ``sum_statistics``; None = A is 1, and one collective sums the statistics here.
        group: the process group; None = the default one, or one process where none is open.

    Returns:
        A float64 scalar. Its value is ``f(S)``, the loss of the global batch, the same on every rank and in every
        micro-step: log it as it is. Its gradient is that of L[r,a].

    Raises:
        LossError: ``totals`` do not match the statistics, ``function`` returns no scalar, or the statistics are not
            what ``sum_statistics`` takes.
    """
    if totals is None:
        totals = sum_statistics([statistics], group=group)
    else:
        _check_statistics([statistics])
    return _loss_of_sums(function, statistics, totals, group)


def _loss_of_sums(
    function: Callable[..., Tensor],
    statistics: Sequence[Tensor],
    totals: Sequence[Tensor],
    group: dist.ProcessGroup | None,
) -> Tensor:
    """Return the loss ``function(totals)`` with the gradient of L[r,a] of ``additive_loss``."""
    shapes = [tuple(s.shape) for s in statistics]
    expected = [tuple(total.shape) for total in totals]
    if shapes != expected:
        raise LossError(
            f"additive_loss got statistics of shapes {shapes} and totals of shapes {expected}, and each total is the "
            "sum of one statistic; give the same statistics to sum_statistics, in the same order"
        )
    # The value of S with the gradient of s[r,a].
    sums = [total + (s - s.detach()).double() for total, s in zip(totals, statistics, strict=True)]
    loss: object = function(*sums)
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        raise LossError(
            f"the function of additive_loss returns {describe(loss)}, and a loss is a scalar; return its mean or sum"
        )
    return scale_gradient(loss, distributed.world_size(group))


@torch.no_grad()
def sum_statistics(
    statistics: Iterable[Sequence[Tensor]], *, group: dist.ProcessGroup | None = None
) -> tuple[Tensor, ...]:
    """Return the sums of statistics over all micro-batches of all ranks, without gradient.

    One collective.

    Args:
        statistics: for each micro-batch of this rank, in any order, its sums over samples; as many and of the same
            shapes in every micro-batch and on every rank.
        group: the process group; None = the default one, or one process where none is open.

    Returns:
        One float64 tensor per statistic, in its shape.

    Raises:
        LossError: there is no micro-batch: a rank without samples gives sums over none, not nothing; a statistic is
            no tensor or complex; or its shape is another one in another micro-batch.
    """
    rows = [tuple(row) for row in statistics]
    _check_statistics(rows)
    sums = torch.stack([_flatten(row) for row in rows]).sum(0)
    add_over_ranks(sums, group)
    parts = torch.split(sums, [statistic.numel() for statistic in rows[0]])
    return tuple(part.view(statistic.shape) for part, statistic in zip(parts, rows[0], strict=True))


def _flatten(statistics: Sequence[Tensor]) -> Tensor:
    """Return all numbers of the statistics in one float64 vector."""
    return torch.cat([statistic.detach().double().reshape(-1) for statistic in statistics])


def _check_statistics(rows: Sequence[Sequence[object]]) -> None:
    """Check the statistics of this rank's micro-batches.

    Raises:
        LossError: they cannot be summed.
    """
    if not rows or not rows[0]:
        raise LossError(
            "sum_statistics got no statistics, and every rank must take part in the sum; give those of an empty share: "
            "sums over no samples, which are 0"
        )
    shapes = []
    for row in rows:
        tensors = [statistic for statistic in row if isinstance(statistic, Tensor)]
        if len(tensors) < len(row):
            raise LossError(
                "a statistic is no tensor, and statistics are tensors, which are summed over ranks; give the sum over "
                "this rank's samples as a tensor, and what the global batch has as global_count of weighted_mean or "
                "inside the function of additive_loss"
            )
        if any(statistic.is_complex() for statistic in tensors):
            raise LossError(
                "a statistic is complex, and sums are made in float64, which would lose its imaginary part; give "
                "torch.view_as_real of it"
            )
        shapes.append([statistic.shape for statistic in tensors])
    if any(shapes_of_row != shapes[0] for shapes_of_row in shapes):
        raise LossError(
            "the statistics of the micro-batches are not as many, or not of the same shapes, and are summed; give sums "
            "over samples, such as losses.sum(), not one number for each sample"
        )


def _check_scalars(*values: object) -> None:
    """Check what ``weighted_mean`` gets; what is no tensor is refused with the other statistics.

    Raises:
        LossError: a tensor has dimensions.
    """
    for value in values:
        if isinstance(value, Tensor) and value.dim() > 0:
            raise LossError(
                f"weighted_mean got a tensor of {value.numel()} numbers with a dimension, and takes the sum over this "
                "rank's samples, a scalar, and what divides it; write losses.sum()"
            )


MicroBatch = TypeVar("MicroBatch")


def unscaled(loss: Tensor) -> Tensor:
    """Return the loss unchanged."""
    return loss


def accumulate_additive(
    function: Callable[..., Tensor],
    statistics: Callable[[MicroBatch], Sequence[Tensor]],
    micro_batches: Sequence[MicroBatch],
    *,
    model: nn.Module,
    scale: Callable[[Tensor], Tensor] = unscaled,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Run forward and backward of one optimizer step whose loss is ``function(sums over the global batch)``.

    ``L[r,a] = W * f(S + s[r,a] - stopgrad(s[r,a]))`` (see ``additive_loss``) needs S, the sums over all ranks *and
    micro-steps*, before the first backward. The first pass computes s[r,a] of every micro-batch without gradient and
    sums them over ranks; the second makes the backwards, all but the last inside ``no_sync``::

        def overlap(batch):
            probability = model(batch[0]).sigmoid()
            return (probability * batch[1]).sum(), (probability + batch[1] - probability * batch[1]).sum()

        loss = accumulate_additive(lambda both, either: 1 - both / either, overlap, micro_batches, model=model)
        optimizer.step()

    Args:
        function: f, as for ``additive_loss``.
        statistics: runs the model on a micro-batch and returns its sums over samples. For an empty share it runs a
            placeholder and returns sums over ``outputs[:0]``.
        micro_batches: this rank's, A of them, as many on every rank.
        model: the model, wrapped in DDP where there are several ranks.
        scale: applied to each loss before its backward: ``scaler.scale`` for fp16.
        group: the process group; None = the default one, or one process where none is open.

    Returns:
        The loss of the global batch, the same on every rank, without gradient.

    Raises:
        LossError: there is no micro-batch, or the statistics or the function are not what ``additive_loss`` takes.
    """
    if not micro_batches:
        raise LossError(
            "there are no micro-batches, and every rank must take part in every collective; give an empty share as a "
            "micro-batch without samples"
        )
    random_states: list[_RandomState] = []
    totals = None
    if len(micro_batches) > 1:
        rows: list[list[Tensor]] = []
        with torch.no_grad(), buffers_restored(model):
            for batch in micro_batches:
                random_states.append(_RandomState())
                rows.append([statistic.detach() for statistic in statistics(batch)])
        # Autocast caches cast weights, and those of this pass have no gradient.
        torch.clear_autocast_cache()
        totals = sum_statistics(rows, group=group)

    last = len(micro_batches) - 1
    for number, batch in enumerate(micro_batches):
        if random_states:
            random_states[number].restore()
        reduction: AbstractContextManager[None] = contextlib.nullcontext()
        if isinstance(model, DistributedDataParallel) and number < last:
            reduction = model.no_sync()
        # The forward belongs inside: there DDP decides whether the backward reduces gradients.
        with reduction:
            loss = additive_loss(function, *statistics(batch), totals=totals, group=group)
            torch.autograd.backward(scale(loss))
    return loss.detach()


class _RandomState:
    """The state of the random number generators that a forward uses."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        # torch leaves the function without types.
        gpu_in_use: Callable[[], bool] = torch.cuda.is_initialized
        self._gpu = torch.cuda.get_rng_state() if gpu_in_use() else None

    def restore(self) -> None:
        """Restore the state that the generators had when this object was created."""
        torch.set_rng_state(self._cpu)
        if self._gpu is not None:
            torch.cuda.set_rng_state(self._gpu)
