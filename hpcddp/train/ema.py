"""Exponential moving average of a model's weights, updated once per optimizer step (``train.ema_decay``)."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hpcddp.train.errors import UserCodeError


class Ema:
    """A copy of the model with averaged weights, used for evaluation.

    After each optimizer step::

        average <- decay * average + (1 - decay) * value

    for every parameter and every running statistic of BatchNorm: statistics of the latest weights do not fit averaged
    weights. The average starts at the initial weights. Other buffers are copied.

    Args:
        model: the model, on its device, before DDP and compilation.
        decay: 0..1, for this job's global batch.

    Raises:
        UserCodeError: the model cannot be copied.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        try:
            self.model = copy.deepcopy(model)
        except (TypeError, RuntimeError, ValueError, AttributeError) as error:
            raise UserCodeError(
                f"train.ema_decay is {decay:g}, which needs a copy of the model, and copy.deepcopy does not make one "
                f"({error}); let the model be copied, or leave ema_decay out"
            ) from error
        self.model.requires_grad_(requires_grad=False)
        self.model.eval()

    @torch.no_grad()
    def update(self, model: nn.Module, skipped: Tensor | None = None) -> None:
        """Move the averages towards the model.

        Args:
            model: the trained model, after its optimizer step.
            skipped: a scalar on the device that is not 0 if that step left the model as it was; None = it did not.
        """
        averages, values = _averaged(self.model), _averaged(model)
        if skipped is None:
            torch._foreach_lerp_(averages, values, 1 - self.decay)
        else:
            # Computed on the device, so that the host does not wait for the step.
            factor = (skipped == 0).to(averages[0].real.dtype) * (1 - self.decay)
            for average, value in zip(averages, values, strict=True):
                average.add_((value - average) * factor)
        for own, other in zip(_copied(self.model), _copied(model), strict=True):
            own.copy_(other)


def _averaged(model: nn.Module) -> list[Tensor]:
    return [*(parameter.detach() for parameter in model.parameters()), *_statistics(model)]


def _statistics(model: nn.Module) -> list[Tensor]:
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    both = [value for layer in layers for value in (layer.running_mean, layer.running_var)]
    return [value for value in both if value is not None]


def _copied(model: nn.Module) -> list[Tensor]:
    averaged = {id(value) for value in _statistics(model)}
    return [buffer for buffer in model.buffers() if id(buffer) not in averaged]
