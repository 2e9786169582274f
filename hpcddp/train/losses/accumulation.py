"""Losses of the global batch with gradient accumulation, computed in two passes over the micro-batches.

The first pass, without gradient, computes what the second one needs before its first backward. Both passes use the same
random numbers (dropout masks), and running statistics are updated once. The two passes cost one more forward. With one
micro-batch per step one pass is enough.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpcddp.train import distributed
from hpcddp.train.buffers import buffers_restored
from hpcddp.train.errors import LossError
from hpcddp.train.losses.additive import additive_loss, sum_statistics
from hpcddp.train.losses.ranks import agree_on_sizes, gather_shares, gather_with_grad

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
    _refuse_none(micro_batches)
    passes = _Passes(model, micro_batches)
    totals = sum_statistics(passes.first(statistics), group=group) if passes.two else None
    for s in passes.second(statistics):
        loss = additive_loss(function, *s, totals=totals, group=group)
        torch.autograd.backward(scale(loss))
    return loss.detach()


def accumulate_gathered(
    function: Callable[..., Tensor],
    embed: Callable[[MicroBatch], Sequence[Tensor]],
    micro_batches: Sequence[MicroBatch],
    *,
    model: nn.Module,
    scale: Callable[[Tensor], Tensor] = unscaled,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Run forward and backward of one optimizer step whose loss compares all samples of the global batch.

    The first pass computes the outputs z[r,a] of every micro-batch without gradient, gathers them over ranks, and takes
    ``g = dF/dz`` of the full loss F once. The second pass makes the backwards, all but the last inside ``no_sync``::

        L[r,a] = W * <g[r,a], z[r,a]>  +  (F(stopgrad(z), tau)  if a = A - 1)

    The first term gives ``sum over r, a of dF/dz[r,a] * dz[r,a]/dparameters`` after DDP's division by W (batch
    contract, section 0), the second dF/dtau for parameters that F uses directly, on every rank, so that their mean is
    it. The first term is the gradient cache of Gao et al. 2021 (arXiv 2101.06983). Memory holds the activations of one
    micro-batch, and B outputs::

        loss = accumulate_gathered(
            lambda image, text: contrastive(image, text, model.module.temperature), model, micro_batches, model=model
        )

    Args:
        function: F; takes the outputs of the global batch in its order, returns a scalar.
        embed: runs the model on a micro-batch and returns its outputs, each ``[n, ...]``; tensors without gradient,
            such as labels, may be among them. For an empty share it runs a placeholder and returns ``outputs[:0]``.
        micro_batches: this rank's, A of them, as many on every rank.
        model: the model, wrapped in DDP where there are several ranks.
        scale: applied to each loss before its backward: ``scaler.scale`` for fp16.
        group: the process group; None = the default one, or one process where none is open.

    Returns:
        The loss of the global batch, the same on every rank, without gradient.

    Raises:
        LossError: there is no micro-batch, or the outputs are not what ``gather_with_grad`` takes.
    """
    _refuse_none(micro_batches)
    passes = _Passes(model, micro_batches)
    if not passes.two:
        (outputs,) = passes.second(lambda batch: [gather_with_grad(z, group=group) for z in embed(batch)])
        loss = function(*outputs)
        torch.autograd.backward(scale(loss))
        return loss.detach()
    rows = [tuple(row) for row in passes.first(embed)]
    gathered, begin = _gather_rows(rows, group)
    loss, gradients = _loss_and_gradients(function, gathered)
    for a, row in enumerate(passes.second(embed)):
        surrogate = _surrogate(row, gradients, begin, distributed.world_size(group))
        if a == len(micro_batches) - 1:
            surrogate = surrogate + function(*gathered)
        torch.autograd.backward(scale(surrogate))
        begin += len(row[0])
    return loss


class _Passes(Generic[MicroBatch]):
    """Runs a function over the micro-batches, without and with gradient, with the same random numbers."""

    def __init__(self, model: nn.Module, micro_batches: Sequence[MicroBatch]) -> None:
        self._model = model
        self._micro_batches = micro_batches
        self._states: list[_RngState] = []
        self.two = len(micro_batches) > 1

    @torch.no_grad()
    def first(self, run: Callable[[MicroBatch], Sequence[Tensor]]) -> list[Sequence[Tensor]]:
        """Return the results of ``run`` for all micro-batches, without gradient; running statistics are restored."""
        rows: list[Sequence[Tensor]] = []
        with buffers_restored(self._model):
            for batch in self._micro_batches:
                self._states.append(_RngState())
                rows.append([tensor.detach() for tensor in run(batch)])
        # Autocast caches cast weights, and those of this pass have no gradient.
        torch.clear_autocast_cache()
        return rows

    def second(self, run: Callable[[MicroBatch], Sequence[Tensor]]) -> Iterator[Sequence[Tensor]]:
        """Yield the result of ``run`` for every micro-batch; the caller runs the backward in the body of its loop."""
        for a, batch in enumerate(self._micro_batches):
            if self._states:
                self._states[a].restore()
            # The forward belongs inside: there DDP decides whether the backward reduces gradients.
            with self._no_sync() if a < len(self._micro_batches) - 1 else contextlib.nullcontext():
                yield run(batch)

    def _no_sync(self) -> AbstractContextManager[None]:
        if isinstance(self._model, DistributedDataParallel):
            return self._model.no_sync()
        return contextlib.nullcontext()


class _RngState:
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


def _refuse_none(micro_batches: Sequence[object]) -> None:
    if not micro_batches:
        raise LossError(
            "there are no micro-batches, and every rank must take part in every collective; give an empty share as a "
            "micro-batch without samples"
        )


def _gather_rows(rows: Sequence[Sequence[Tensor]], group: dist.ProcessGroup | None) -> tuple[list[Tensor], int]:
    """Return each output of the global batch, and where this rank's samples begin in it."""
    # A scalar cannot be concatenated; what is wrong with it is said by all ranks at once.
    columns = [torch.cat(z) if all(part.dim() for part in z) else z[0] for z in zip(*rows, strict=True)]
    sizes = agree_on_sizes(columns, group=group)
    return [gather_shares(column, sizes, group) for column in columns], sum(sizes[: distributed.rank(group)])


def _loss_and_gradients(
    function: Callable[..., Tensor], gathered: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor | None]]:
    """Return F without gradient, and dF/dz for each output; None where it has none."""
    leaves = [z.detach().requires_grad_(z.is_floating_point() or z.is_complex()) for z in gathered]
    loss = function(*leaves)
    wanted = [z for z in leaves if z.requires_grad]
    gradients = iter(torch.autograd.grad(loss, wanted, allow_unused=True))
    return loss.detach(), [next(gradients) if z.requires_grad else None for z in leaves]


def _surrogate(outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], begin: int, factor: int) -> Tensor:
    """Return ``factor * sum of <g, z>``, whose gradient is that of F through these outputs.

    Args:
        outputs: z of one micro-batch, each ``[n, ...]``.
        gradients: dF/dz of the global batch.
        begin: where the micro-batch begins in it.
        factor: W.
    """
    # For complex z, the real part of the inner product has the gradient g.
    products = [
        (g[begin : begin + len(z)].conj() * z).real.sum()
        for z, g in zip(outputs, gradients, strict=True)
        if g is not None
    ]
    return sum(products[1:], start=products[0]) * factor
