"""Which layers take statistics over samples, and over whose: ``train.batch_norm``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.lazy import LazyModuleMixin

from hpcddp.spec.training import BatchNorm
from hpcddp.train.errors import ModelError
from hpcddp.train.sync_batch_norm import NativeSyncBatchNorm, SyncBatchNorm

_SYNCHRONISED: Final = (SyncBatchNorm, NativeSyncBatchNorm)


def choose_batch_norm(model: nn.Module, mode: BatchNorm, device_type: str) -> None:
    """Make the model's BatchNorm what the job asks for, in place.

    A layer stays the same object and only changes its class: parameters, buffers, hooks and their names stay, so a
    state dictionary of one mode fits the other. Layers that the model's author made ``torch.nn.SyncBatchNorm`` are
    synchronised in both modes.

    Args:
        model: the model.
        mode: ``sync`` takes statistics over all ranks, ``local`` of each rank's own micro-batch.
        device_type: ``cuda`` takes torch's native layer.

    Raises:
        ModelError: mode is sync, and a layer computes in a way of its own.
    """
    for name, layer in model.named_modules():
        if not isinstance(layer, _BatchNorm) or isinstance(layer, _SYNCHRONISED):
            continue
        if isinstance(layer, nn.SyncBatchNorm):
            _change_class(layer, device_type)
        elif mode == "sync":
            _refuse_own_forward(name, layer)
            layer.process_group = None  # type: ignore[assignment]  # what torch's layer has
            _change_class(layer, device_type)


def _change_class(layer: nn.Module, device_type: str) -> None:
    # As torch's own lazy layers become what they stand for.
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
    """Return whether a layer takes its statistics over all ranks."""
    return isinstance(layer, _SYNCHRONISED)


def local_batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """Return the layers whose statistics are those of a rank's own micro-batches."""
    return [layer for layer in model.modules() if isinstance(layer, _BatchNorm) and not is_synchronised(layer)]


def local_norms(model: nn.Module) -> list[_NormBase]:
    """Return all layers with running statistics of a rank's own: local BatchNorm, and InstanceNorm that tracks."""
    return [layer for layer in model.modules() if isinstance(layer, _NormBase) and not is_synchronised(layer)]


def synchronised_batch_norms(model: nn.Module) -> list[SyncBatchNorm | NativeSyncBatchNorm]:
    """Return the layers whose statistics are those of all ranks."""
    return [layer for layer in model.modules() if isinstance(layer, _SYNCHRONISED)]


@contextmanager
def absent(model: nn.Module) -> Iterator[None]:
    """Let this rank count nothing in the statistics of all ranks; the other ranks go through the same layers."""
    layers = synchronised_batch_norms(model)
    for layer in layers:
        layer.absent = True
    yield
    for layer in layers:
        layer.absent = False
