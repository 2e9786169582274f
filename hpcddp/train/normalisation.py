"""Make the BatchNorm layers of a model local or synchronised (``train.batch_norm``), and find layers of either kind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, cast

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.lazy import LazyModuleMixin

from hpcddp.jobfile.sections import BatchNorm
from hpcddp.train.errors import ModelError
from hpcddp.train.sync_batch_norm import NativeSyncBatchNorm, SyncBatchNorm

_SYNCHRONISED: Final = (SyncBatchNorm, NativeSyncBatchNorm)


def choose_batch_norm(model: nn.Module, mode: BatchNorm, device_type: str) -> None:
    """Synchronise the model's BatchNorm layers in place, if the job asks for it.

    A layer stays the same object and only changes its class: parameters, buffers, hooks and their names stay, so a
    state dictionary of one mode fits the other. A ``torch.nn.SyncBatchNorm`` of the model is synchronised in both
    modes.

    Args:
        model: the model.
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
    yield
    for layer in layers:
        layer.absent = False
