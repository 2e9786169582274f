"""Steps of an optimizer under fp16's scaler, on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hpcddp.jobfile.sections import Optimizer
from hpcddp.train.model.replica import build_optimizer


def parameters_after_steps(gradients: list[Any], *, nesterov: bool, fused: bool, device: str = "cpu") -> torch.Tensor:
    """Return two parameters after steps under fp16's scaler; where the gradient is None one of them has none."""
    model = nn.ParameterList(nn.Parameter(torch.tensor([value], device=device)) for value in (1.0, -2.0))
    # Powers of two: nothing rounds.
    constants = Optimizer(momentum=0.5, weight_decay=0.25, nesterov=nesterov)
    # The fused kernel is there on the CPU too.
    device_type = "cuda" if fused else "cpu"
    optimizer = build_optimizer(constants, model, learning_rate=0.5, device_type=device_type)
    assert optimizer.param_groups[0]["fused"] is (True if fused else None)
    scaler = torch.amp.GradScaler(device, init_scale=1.0)
    scaler.scale(torch.zeros((), device=device))
    for gradient in gradients:
        model[0].grad = torch.tensor([1.0 if gradient is None else float(gradient)], device=device)
        model[1].grad = None if gradient is None else torch.tensor([float(gradient)], device=device)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update(1.0)
    return torch.cat([parameter.detach().cpu() for parameter in model])
