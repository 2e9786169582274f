"""Looking at a model's gradients."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def gradients(model: nn.Module) -> list[Tensor]:
    """Return the gradients that there are."""
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def nonfinite_gradient(model: nn.Module) -> Tensor:
    """Return a float64 scalar on the device: 1 if some gradient is infinite or not a number, else 0."""
    # The largest entry: a sum of squares could overflow where every entry is finite.
    largest = nn.utils.get_total_norm(gradients(model), norm_type=math.inf)
    return torch.isfinite(largest).logical_not().double()
