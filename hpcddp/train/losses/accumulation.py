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
    _refuse_no_micro_batches(micro_batches)
    passes = _Passes(model, micro_batches)
    totals = None
    if len(micro_batches) > 1:
        totals = sum_statistics(passes.run_without_gradient(statistics), group=group)
    for sums in passes.run_with_gradient(statistics):
        loss = additive_loss(function, *sums, totals=totals, group=group)
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
    _refuse_no_micro_batches(micro_batches)
    if len(micro_batches) == 1:
        loss = function(*(gather_with_grad(z, group=group) for z in embed(micro_batches[0])))
        torch.autograd.backward(scale(loss))
        return loss.detach()

    # The first pass: z of the global batch, without gradient.
    passes = _Passes(model, micro_batches)
    share = _concatenate(passes.run_without_gradient(embed))
    sizes = agree_on_sizes(share, group=group)
    global_outputs = [gather_shares(z, sizes, group) for z in share]

    # F and dF/dz.
    leaves = [z.detach().requires_grad_(z.is_floating_point() or z.is_complex()) for z in global_outputs]
    loss = function(*leaves)
    gradients = _gradients(loss, leaves)
    loss = loss.detach()

    # The second pass: the backwards. ``begin`` is the row of the global batch with which a micro-batch begins.
    begin = sum(sizes[: distributed.rank(group)])
    for number, outputs in enumerate(passes.run_with_gradient(embed), start=1):
        surrogate = _surrogate(outputs, gradients, begin, distributed.world_size(group))
        is_last = number == len(micro_batches)
        if is_last:
            # The gradient of the parameters that F uses directly.
            surrogate = surrogate + function(*global_outputs)
        torch.autograd.backward(scale(surrogate))
        begin += len(outputs[0])
    return loss


class _Passes(Generic[MicroBatch]):
    """Runs a function over the micro-batches, without and with gradient, with the same random numbers."""

    def __init__(self, model: nn.Module, micro_batches: Sequence[MicroBatch]) -> None:
        self._model = model
        self._micro_batches = micro_batches
        # The random states before each micro-batch of the first pass; empty if there was none.
        self._random_states: list[_RandomState] = []

    @torch.no_grad()
    def run_without_gradient(self, run: Callable[[MicroBatch], Sequence[Tensor]]) -> list[Sequence[Tensor]]:
        """Return the results of ``run`` for all micro-batches; running statistics are restored."""
        results: list[Sequence[Tensor]] = []
        with buffers_restored(self._model):
            for batch in self._micro_batches:
                self._random_states.append(_RandomState())
                results.append([tensor.detach() for tensor in run(batch)])
        # Autocast caches cast weights, and those of this pass have no gradient.
        torch.clear_autocast_cache()
        return results

    def run_with_gradient(self, run: Callable[[MicroBatch], Sequence[Tensor]]) -> Iterator[Sequence[Tensor]]:
        """Yield the result of ``run`` for every micro-batch; the caller runs the backward in the body of its loop."""
        last = len(self._micro_batches) - 1
        for number, batch in enumerate(self._micro_batches):
            if self._random_states:
                self._random_states[number].restore()
            # The forward belongs inside: there DDP decides whether the backward reduces gradients.
            with self._reduction_of_gradients(is_last=number == last):
                yield run(batch)

    def _reduction_of_gradients(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Return the context in which DDP reduces gradients after the last micro-batch, and not before."""
        if isinstance(self._model, DistributedDataParallel) and not is_last:
            return self._model.no_sync()
        return contextlib.nullcontext()


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


def _refuse_no_micro_batches(micro_batches: Sequence[object]) -> None:
    if not micro_batches:
        raise LossError(
            "there are no micro-batches, and every rank must take part in every collective; give an empty share as a "
            "micro-batch without samples"
        )


def _concatenate(micro_batches: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return each output of all micro-batches of this rank, along dimension 0."""
    share = []
    for parts in zip(*micro_batches, strict=True):
        if all(part.dim() for part in parts):
            share.append(torch.cat(parts))
        else:
            # A scalar cannot be concatenated; what is wrong with it is said by all ranks at once.
            share.append(parts[0])
    return share


def _gradients(loss: Tensor, leaves: Sequence[Tensor]) -> list[Tensor | None]:
    """Return dF/dz for each output z; None where F does not depend on it, or it cannot have a gradient."""
    positions = [position for position, z in enumerate(leaves) if z.requires_grad]
    derivatives = torch.autograd.grad(loss, [leaves[position] for position in positions], allow_unused=True)
    gradients: list[Tensor | None] = [None] * len(leaves)
    for position, derivative in zip(positions, derivatives, strict=True):
        gradients[position] = derivative
    return gradients


def _surrogate(outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], begin: int, factor: int) -> Tensor:
    """Return ``factor * sum of <g, z>``, whose gradient is that of F through these outputs.

    Args:
        outputs: z of one micro-batch, each ``[n, ...]``.
        gradients: dF/dz of the global batch.
        begin: where the micro-batch begins in it.
        factor: W.
    """
    products = []
    for z, g in zip(outputs, gradients, strict=True):
        if g is not None:
            # For complex z, the real part of the inner product has the gradient g.
            products.append((g[begin : begin + len(z)].conj() * z).real.sum())
    return sum(products[1:], start=products[0]) * factor
