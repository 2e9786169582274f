"""A loss of sums over the global batch with gradient accumulation, computed in two passes over the micro-batches.

The first pass, without gradient, computes what the second one needs before its first backward. Both passes use the same
random numbers (dropout masks), and running statistics are updated once. The two passes cost one more forward. With one
micro-batch per step one pass is enough.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpcddp.train.buffers import buffers_restored
from hpcddp.train.errors import LossError
from hpcddp.train.losses.additive import additive_loss, sum_statistics

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
