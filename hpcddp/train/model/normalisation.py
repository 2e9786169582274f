"""Normalisation layers over ranks: which layers are local, and BatchNorm synchronised over uneven shares."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.lazy import LazyModuleMixin

from hpcddp.jobfile.sections import BatchNorm
from hpcddp.train.distributed import world_size
from hpcddp.train.errors import ModelError
from hpcddp.train.losses.ranks import add_over_ranks

# [n, C], before any dimensions of space.
_LEAST_DIMENSIONS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Statistics of every channel over all ranks, bitwise equal on each.

    Args:
        count: values per channel, over all ranks.
        mean: ``[C]``, float64.
        squares: ``[C]``, float64: the sum of squared distances from the mean.
    """

    count: int
    mean: Tensor
    squares: Tensor


def gather_statistics(inputs: Tensor, *, absent: bool, group: dist.ProcessGroup | None) -> Statistics:
    """Return the statistics over all ranks; one collective.

    Each rank computes the mean and the squared distances of its own values. They are combined by the formula of Chan,
    Golub and LeVeque 1979 ("Updating formulae and a pairwise algorithm for computing sample variances"), which does
    not subtract large sums from each other.

    Args:
        inputs: ``[n, C, ...]``, n >= 0.
        absent: whether the inputs are a placeholder that does not count.
        group: the process group; None = the default one.
    """
    count = 0 if absent else inputs.numel() // inputs.shape[1]
    row = torch.zeros(2 * inputs.shape[1] + 1, dtype=torch.float64, device=inputs.device)
    if count:
        wide = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
        variance, mean = torch.var_mean(wide, _reduced(inputs), correction=0)
        row[0] = count
        row[1:] = torch.cat([mean.double(), variance.double() * count])
    rows = [torch.empty_like(row) for _ in range(world_size(group))]
    dist.all_gather(rows, row, group=group)
    counts, means, squares = torch.split(torch.stack(rows), [1, inputs.shape[1], inputs.shape[1]], dim=1)
    total = counts.sum()
    mean = (counts * means).sum(dim=0) / total
    between = (counts * (means - mean).square()).sum(dim=0)
    return Statistics(count=int(total), mean=mean, squares=squares.sum(dim=0) + between)


def _reduced(inputs: Tensor) -> list[int]:
    """Return the dimensions over which a channel's statistics are taken: all but the second."""
    return [0, *range(2, inputs.ndim)]


def _along_channels(values: Tensor, inputs: Tensor) -> Tensor:
    """Return ``[C]`` as ``[1, C, 1, ...]``."""
    return values.view(1, -1, *[1] * (inputs.ndim - 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class _OverRanks:
    """How the statistics of a forward were taken over ranks.

    Args:
        count: values per channel, over all ranks.
        group: the process group; None = the default one.
        absent: whether this rank's inputs are a placeholder that does not count.
    """

    count: int
    group: dist.ProcessGroup | None
    absent: bool


class _NormaliseContext(Protocol):
    """What the forward keeps for the backward."""

    over_ranks: _OverRanks
    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, Tensor | None, Tensor, Tensor]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...


class _Normalise(Function):
    """``weight * (x - mean) / sqrt(var + eps) + bias`` with the mean and variance of all ranks.

    With z the normalised values, g the gradient of the output and N the count over all ranks::

        dx = weight / sqrt(var + eps) * (g - sum(g) / N - z * sum(g * z) / N)       sums over all ranks
        dweight = sum(g * z), dbias = sum(g)                                         of this rank; DDP adds them

    (Ioffe and Szegedy 2015, arXiv 1502.03167, section 3, with the sums over ranks.)
    """

    @staticmethod
    def forward(
        ctx: _NormaliseContext,
        inputs: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        inverse: Tensor,
        over_ranks: _OverRanks,
    ) -> Tensor:
        ctx.over_ranks = over_ranks
        ctx.save_for_backward(inputs, weight, mean, inverse)
        outputs = (inputs - _along_channels(mean, inputs)) * _along_channels(inverse, inputs)
        if weight is not None:
            outputs = outputs * _along_channels(weight, inputs)
        if bias is not None:
            outputs = outputs + _along_channels(bias, inputs)
        return outputs.to(inputs.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: _NormaliseContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight, mean, inverse = ctx.saved_tensors
        over_ranks = ctx.over_ranks
        outer = gradients[0].to(mean.dtype)
        normalised = (inputs - _along_channels(mean, inputs)) * _along_channels(inverse, inputs)
        sums_here = torch.stack([outer.sum(_reduced(inputs)), (outer * normalised).sum(_reduced(inputs))])
        inputs_gradient = None
        weight_gradient = None
        bias_gradient = None
        if ctx.needs_input_grad[0]:
            sums = sums_here.clone()
            if over_ranks.absent:
                sums.zero_()
            add_over_ranks(sums, over_ranks.group)
            if not over_ranks.absent:
                through = normalised * _along_channels(sums[1], inputs) + _along_channels(sums[0], inputs)
                outer = outer - through / over_ranks.count
            factor = inverse
            if weight is not None:
                factor = inverse * weight
            inputs_gradient = (outer * _along_channels(factor, inputs)).to(inputs.dtype)
        if weight is not None and ctx.needs_input_grad[1]:
            weight_gradient = sums_here[1].to(weight.dtype)
        if ctx.needs_input_grad[2]:
            bias_gradient = sums_here[0]
        return inputs_gradient, weight_gradient, bias_gradient, None, None, None


class SyncBatchNorm(_BatchNorm):
    """BatchNorm over all ranks, on any device; in evaluation mode it is BatchNorm.

    It is exact for shares of any size: outputs, gradients and running statistics are those of one process with the
    samples of all ranks. Parameters and buffers have the names of those of BatchNorm.

    Attributes:
        absent: whether the input is a placeholder that does not count.
        process_group: the ranks; None = all.
    """

    absent = False
    process_group: dist.ProcessGroup | None = None

    def _check_input_dim(self, inputs: Tensor) -> None:
        if inputs.ndim < _LEAST_DIMENSIONS:
            raise ValueError(f"expected at least 2D input (got {inputs.ndim}D input)")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's name
        """Normalise ``[n, C, ...]``.

        Raises:
            ValueError: in training mode there is at most one value per channel over all ranks.
        """
        if not self.training or world_size(self.process_group) == 1:
            return super().forward(input)
        self._check_input_dim(input)
        with torch.no_grad():
            statistics = gather_statistics(input, absent=self.absent, group=self.process_group)
            if statistics.count <= 1:
                raise ValueError(
                    f"Expected more than 1 value per channel over all ranks when training, got {statistics.count}"
                )
            self._track(statistics)
            dtype = torch.promote_types(input.dtype, torch.float32)
            inverse = (statistics.squares / statistics.count + self.eps).rsqrt()
        outputs: Tensor = _Normalise.apply(
            input,
            self.weight,
            self.bias,
            statistics.mean.to(dtype),
            inverse.to(dtype),
            _OverRanks(count=statistics.count, group=self.process_group, absent=self.absent),
        )
        return outputs

    def _track(self, statistics: Statistics) -> None:
        """Update the running statistics as BatchNorm does; momentum None means the mean over all batches."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        factor = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            factor = 1.0 / int(self.num_batches_tracked) if factor is None else factor
        factor = factor or 0.0
        variance = statistics.squares / (statistics.count - 1)
        for running, value in ((self.running_mean, statistics.mean), (self.running_var, variance)):
            running.mul_(1 - factor).add_(value.to(running.dtype), alpha=factor)


class NativeSyncBatchNorm(nn.SyncBatchNorm):
    """torch's SyncBatchNorm, which needs a GPU, with placeholders that do not count.

    Attributes:
        absent: whether the input is a placeholder that does not count.
    """

    absent = False

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's name
        """Normalise ``[n, C, ...]``."""
        if not (self.absent and self.training):
            return super().forward(input)
        # An input without rows joins torch's collectives and counts 0. torch communicates in the input's dtype, so a
        # half-precision input would not match the single precision of the other ranks.
        nothing = super().forward(input[:0].to(torch.promote_types(input.dtype, torch.float32)))
        outputs = functional.batch_norm(
            input,
            None if self.running_mean is None else self.running_mean.clone(),
            None if self.running_var is None else self.running_var.clone(),
            self.weight,
            self.bias,
            training=self.running_mean is None,
            eps=self.eps,
        )
        # The backward must pass through those collectives too.
        return outputs + nothing.sum().to(outputs.dtype) * 0


_SYNCHRONISED: Final = (SyncBatchNorm, NativeSyncBatchNorm)


def choose_batch_norm(model: nn.Module, mode: BatchNorm, device_type: str) -> None:
    """Synchronise the model's BatchNorm layers in place, if the job asks for it.

    A layer stays the same object and only changes its class: parameters, buffers, hooks and their names stay, so a
    state dictionary of one mode fits the other. A ``torch.nn.SyncBatchNorm`` of the model is synchronised in both
    modes.

    Args:
        mode: ``sync`` takes statistics over all ranks, ``local`` of each rank's own micro-batch.
        device_type: ``cuda`` uses torch's native layer.

    Raises:
        ModelError: mode is sync, and a layer has its own forward or is lazy.
    """
    for name, layer in model.named_modules():
        if not isinstance(layer, _BatchNorm) or isinstance(layer, _SYNCHRONISED):
            continue
        if isinstance(layer, nn.SyncBatchNorm):
            _change_class(layer, device_type)
        elif mode == "sync":
            _refuse_own_forward(name, layer)
            _change_class(layer, device_type)
            # Both synchronised layers have one.
            cast("SyncBatchNorm", layer).process_group = None


def keep_uncompiled(model: nn.Module) -> None:
    """Keep the synchronised layers of a model out of ``torch.compile``: collectives, and branches that depend on data.

    Only for a model that will be compiled: it loads torch's compiler, which takes as long as torch itself.
    """
    if any(isinstance(layer, SyncBatchNorm) for layer in model.modules()):
        # torch declares no types for its decorator.
        SyncBatchNorm.forward = torch.compiler.disable(SyncBatchNorm.forward)  # type: ignore[method-assign, no-untyped-call]


def _change_class(layer: nn.Module, device_type: str) -> None:
    # torch's lazy layers change their class in the same way.
    layer.__class__ = NativeSyncBatchNorm if device_type == "cuda" else SyncBatchNorm


def _refuse_own_forward(name: str, layer: _BatchNorm) -> None:
    kind = type(layer)
    if isinstance(layer, LazyModuleMixin):
        why = "does not know its size before the first batch; write a BatchNorm with num_features"
    elif kind.forward is not _BatchNorm.forward:
        why = "has a forward of its own, which would be lost; write a plain BatchNorm"
    else:
        return
    raise ModelError(
        f"train.batch_norm is sync, and layer {name or '(the model)'} is a {kind.__name__}, which {why}, or "
        "train.batch_norm local"
    )


def is_synchronised(layer: nn.Module) -> bool:
    """Return whether a layer computes its statistics over all ranks."""
    return isinstance(layer, _SYNCHRONISED)


def local_batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """Return the BatchNorm layers that compute their statistics over a rank's own micro-batches."""
    return [layer for layer in model.modules() if isinstance(layer, _BatchNorm) and not is_synchronised(layer)]


def local_norms(model: nn.Module) -> list[_NormBase]:
    """Return the layers with running statistics of a rank's own data: local BatchNorm and InstanceNorm."""
    return [layer for layer in model.modules() if isinstance(layer, _NormBase) and not is_synchronised(layer)]


def synchronised_batch_norms(model: nn.Module) -> list[SyncBatchNorm | NativeSyncBatchNorm]:
    """Return the BatchNorm layers that compute their statistics over all ranks."""
    return [layer for layer in model.modules() if isinstance(layer, _SYNCHRONISED)]


@contextmanager
def absent(model: nn.Module) -> Iterator[None]:
    """Exclude this rank's inputs from synchronised statistics within the block; it still joins the collectives."""
    layers = synchronised_batch_norms(model)
    for layer in layers:
        layer.absent = True
    try:
        yield
    finally:
        for layer in layers:
            layer.absent = False
