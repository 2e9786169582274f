"""Disable dropout and fix the statistics of local BatchNorm, so that two trainings can be compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcddp.train.normalisation import local_batch_norms

_FUNCTIONS: Final = ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d")
# Names of the layers of torchvision and timm that drop whole branches; they have no common base class.
_BRANCHES: Final = ("StochasticDepth", "DropPath")


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Disable dropout within the block, in layers and in functions."""
    before = {name: getattr(functional, name) for name in _FUNCTIONS}
    restored = [_disable_dropout(layer) for layer in model.modules()]
    for name in _FUNCTIONS:
        setattr(functional, name, _unchanged)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(functional, name, function)
        for layer, attribute, value in filter(None, restored):
            setattr(layer, attribute, value)


def _disable_dropout(layer: nn.Module) -> tuple[nn.Module, str, Any] | None:
    """Disable the dropout of one layer; return the layer, the changed attribute and its old value, or None."""
    if type(layer).__name__ in _BRANCHES:
        before = (layer, "training", layer.training)
        layer.training = False
        return before
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
