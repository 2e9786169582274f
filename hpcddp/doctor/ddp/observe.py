"""Train a few steps without noise, and record them: samples, losses, gradients, parameters and buffers.

The one process writes its gradients to files; rank 0 of the W ranks compares its own with them.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from hpcddp.batch.sampler import GlobalBatches
from hpcddp.train.buffers import as_real
from hpcddp.train.data.loader import Batches, MicroBatchKeys
from hpcddp.train.data.parts import MicroBatch
from hpcddp.train.loop.agreement import agree_on_step
from hpcddp.train.loop.assembly import Setting, make_replica
from hpcddp.train.loop.step import Stepper
from hpcddp.train.model.normalisation import local_batch_norms
from hpcddp.train.model.replica import Replica

# A parameter's gradient whose norm is below this fraction of the whole gradient's is rounding error.
_FLOORS: Final = {torch.float64: 1e-6, torch.float32: 1e-2}


@dataclass(slots=True)
class _RecordingBatches:
    """Iterator over this rank's micro-batches that keeps the digests of their samples."""

    batches: Iterator[MicroBatch]
    samples: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        inputs, labels = batch = next(self.batches)
        self.samples += [digest(image, label) for image, label in zip(inputs, labels, strict=True)]
        return batch


def digest(*tensors: Tensor) -> str:
    """Return a short text that differs when the tensors differ."""
    contents = hashlib.sha256()
    for tensor in tensors:
        contents.update(tensor.detach().contiguous().numpy().tobytes())
    return contents.hexdigest()[:16]


def digests(model: nn.Module) -> dict[str, str]:
    """Return the digest of every parameter, by name."""
    return {name: digest(parameter) for name, parameter in model.named_parameters()}


def observe_steps(setting: Setting, record: Path, *, steps: int, frozen: bool) -> dict[str, Any]:
    """Make a few optimizer steps as the training does, without dropout, and return the observations.

    Args:
        setting: the training; the one process writes the record, rank 0 of several reads it.
        record: path prefix of the files with the one process's gradients, one per step.
        steps: K.
        frozen: whether local BatchNorm uses fixed statistics.
    """
    replica = make_replica(setting)
    if frozen:
        freeze_batch_norm(replica.model, replica.placeholder)
    with without_dropout(replica.model):
        return {
            "grad_accum_steps": setting.plan.batch.grad_accum_steps,
            "steps": [*_steps(setting, replica, record, steps)],
        }


def _steps(setting: Setting, replica: Replica, record: Path, steps: int) -> Iterator[dict[str, Any]]:
    context = setting.context
    batches = _RecordingBatches(_batches(setting, steps))
    stepper = Stepper(replica, setting.plan.batch, context.train, batches, context.rank)
    gradients: dict[str, NDArray[Any]] = {}

    def keep_gradients(*_: object) -> None:
        gradients.update(_gradients(replica.model))

    # At this point gradients are averaged and not changed, since clipping is off.
    replica.optimizer.register_step_pre_hook(keep_gradients)
    for position in itertools.islice(setting.schedule.positions(0), steps):
        batches.samples.clear()
        computed = stepper.compute(position)
        agreement = agree_on_step(computed.part)
        stepper.update(computed)
        loss = agreement.read().steps[0].loss_sum / position.samples
        all_gradients = np.concatenate([*gradients.values()])
        path = record.with_name(f"{record.name}-{position.step}.raw")
        compared = None
        if context.world_size == 1:
            all_gradients.tofile(path)
        elif context.is_main:
            dtype = next(iter(gradients.values())).dtype
            compared = _compare(gradients, np.fromfile(path, dtype=dtype))
        yield {
            "loss": loss,
            "samples": [*batches.samples],
            "parameters": digests(replica.model),
            "buffers": _buffer_digests(replica.model),
            "gradient_norm": float(np.linalg.norm(all_gradients)),
            "gradients": compared,
        }


def _batches(setting: Setting, steps: int) -> Iterator[MicroBatch]:
    spec = setting.context.spec
    data = setting.data
    train = setting.context.train
    keys = MicroBatchKeys(
        GlobalBatches(data.units, spec.global_batch_size, spec.batch.tail, spec.batch.order, train.seed),
        setting.plan.batch,
        setting.context.rank,
        groups=data.groups,
        seed=train.seed,
        first_step=0,
        last_step=min(steps, setting.schedule.total_steps),
    )
    return iter(Batches(data, data.train, keys, setting.placement, workers=0))


def _gradients(model: nn.Module) -> Iterator[tuple[str, NDArray[Any]]]:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            yield name, as_real(gradient.detach().clone()).reshape(-1).numpy()


def _buffer_digests(model: nn.Module) -> dict[str, str]:
    """Return the digest of every buffer by name, except those of local BatchNorm, which differ by design."""
    local_buffers: set[int] = set()
    for layer in local_batch_norms(model):
        local_buffers.update(id(buffer) for buffer in layer.buffers())
    return {name: digest(buffer) for name, buffer in model.named_buffers() if id(buffer) not in local_buffers}


def _compare(gradients: Mapping[str, NDArray[Any]], record: NDArray[Any]) -> dict[str, dict[str, float]]:
    """Return for every parameter the relative error of its gradient, and its ratio to the recorded gradient.

    ``ratio`` is the factor that brings the recorded gradient closest to this one, and ``rest`` the remaining relative
    error; both are NaN if the recorded gradient is negligible.
    """
    whole = float(np.linalg.norm(record))
    floor = whole * _FLOORS.get(torch.from_numpy(record).dtype, 1e-2)
    comparison = {}
    first = 0
    for name, gradient in gradients.items():
        expected = record[first : first + gradient.size]
        first += gradient.size
        length = float(np.linalg.norm(expected))
        ratio = float(gradient @ expected) / length**2 if length > floor else math.nan
        comparison[name] = {
            "error": _relative(gradient - expected, max(length, floor)),
            "ratio": ratio,
            "rest": _relative(gradient - ratio * expected, length),
        }
    return comparison


def _relative(difference: NDArray[Any], length: float) -> float:
    """Return the norm of a difference divided by a length; infinite, or 0 without a difference, if that is 0."""
    norm = float(np.linalg.norm(difference))
    if length:
        return norm / length
    return math.inf if norm else 0.0


def forward(model: nn.Module, inputs: Tensor, *, dropout: bool) -> Tensor:
    """Return the main outputs ``[n, K]`` in training mode, with or without dropout."""
    with torch.no_grad(), nullcontext() if dropout else without_dropout(model):
        outputs = model(inputs)
    return outputs if isinstance(outputs, Tensor) else next(iter(outputs))


_FUNCTIONS: Final = ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d")
# Names of the layers of torchvision and timm that drop whole branches; they have no common base class.
_BRANCHES: Final = ("StochasticDepth", "DropPath")


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Disable dropout within the block, in layers and in functions."""
    functions = {name: getattr(functional, name) for name in _FUNCTIONS}
    restored = [_disable_dropout(layer) for layer in model.modules()]
    for name in _FUNCTIONS:
        setattr(functional, name, _unchanged)
    try:
        yield
    finally:
        for name, function in functions.items():
            setattr(functional, name, function)
        for layer, attribute, value in filter(None, restored):
            setattr(layer, attribute, value)


def _disable_dropout(layer: nn.Module) -> tuple[nn.Module, str, Any] | None:
    """Disable the dropout of one layer; return the layer, the changed attribute and its old value, or None."""
    if type(layer).__name__ in _BRANCHES:
        attribute = (layer, "training", layer.training)
        layer.training = False
        return attribute
    if isinstance(layer, nn.MultiheadAttention | nn.RNNBase):
        attention = (layer, "dropout", layer.dropout)
        layer.dropout = 0.0
        return attention
    return None


def _unchanged(input: Tensor, *_: object, **__: object) -> Tensor:  # noqa: A002  callers use torch's name
    return input


@torch.no_grad()
def freeze_batch_norm(model: nn.Module, inputs: Tensor) -> None:
    """Make local BatchNorm use running statistics, equal on every rank, instead of those of the micro-batch.

    The running statistics are the average of those of ``inputs`` and of mean 0, variance 1, so that the outputs of a
    deep model neither grow without bound nor are divided by a variance near 0.

    Args:
        model: the model, in training mode.
        inputs: samples ``[n, ...]``, n >= 2, the same on every rank.
    """
    layers = local_batch_norms(model)
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = 0.5
    model(inputs)
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
        if layer.track_running_stats:
            layer.eval()
