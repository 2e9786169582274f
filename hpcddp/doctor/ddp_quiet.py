"""Making a model comparable: what is random, or taken over the samples of a micro-batch, is held still."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcddp.train.normalisation import local_batch_norms

_FUNCTIONS: Final = ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d")
# Layers that drop whole branches have no base class; torchvision's and timm's are called so.
_BRANCHES: Final = ("StochasticDepth", "DropPath")


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Let dropout pass everything, as layer and as function."""
    before = {name: getattr(functional, name) for name in _FUNCTIONS}
    restored = [_silence(layer) for layer in model.modules()]
    for name in _FUNCTIONS:
        setattr(functional, name, _unchanged)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(functional, name, function)
        for layer, attribute, value in filter(None, restored):
            setattr(layer, attribute, value)


def _silence(layer: nn.Module) -> tuple[nn.Module, str, Any] | None:
    """Turn one layer's dropout off; return what it takes to turn it on again."""
    if type(layer).__name__ in _BRANCHES:
        before = (layer, "training", layer.training)
        layer.training = False
        return before
    if isinstance(layer, nn.MultiheadAttention | nn.RNNBase):
        attention = (layer, "dropout", layer.dropout)
        layer.dropout = 0.0
        return attention
    return None


def _unchanged(input: Tensor, *_: Any, **__: Any) -> Tensor:  # noqa: A002, ANN401  torch calls it so
    return input


@torch.no_grad()
def freeze_batch_norm(model: nn.Module, inputs: Tensor) -> None:
    """Let local BatchNorm use running statistics, the same on every rank, in place of those of the micro-batch.

    The statistics are half those of ``inputs`` and half mean 0, variance 1: a deep model then neither blows up nor
    divides by a variance of nothing.

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
