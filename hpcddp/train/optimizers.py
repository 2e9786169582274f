"""Build the optimizer of a job and set its learning rate."""

from __future__ import annotations

import torch
from torch import nn, optim

from hpcddp.jobfile.sections import Optimizer


def build_optimizer(spec: Optimizer, model: nn.Module, *, learning_rate: float, device_type: str) -> optim.Optimizer:
    """Return an optimizer over the parameters that require a gradient.

    Args:
        spec: the job's ``train.optimizer``.
        model: the model, on its device.
        learning_rate: the rate of the first step; every step sets its own.
        device_type: ``cuda`` uses the fused kernels, one launch for all parameters, unless a parameter is complex.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # torch's fused kernels take no complex numbers.
    fused = (device_type == "cuda" and not any(parameter.is_complex() for parameter in parameters)) or None
    if spec.name == "adamw":
        return optim.AdamW(
            parameters, lr=learning_rate, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay, fused=fused
        )
    optimizer = optim.SGD(
        parameters,
        lr=learning_rate,
        momentum=spec.momentum,
        weight_decay=spec.weight_decay,
        nesterov=spec.nesterov,
        fused=fused,
    )
    if fused and spec.momentum:
        optimizer.register_step_pre_hook(_begin_momentum_at_zero)
    return optimizer


def _begin_momentum_at_zero(optimizer: optim.Optimizer, *_: object) -> None:
    """Allocate the momentum of every parameter with a gradient as zeros, before a fused step does it.

    The fused step writes the momentum in the same kernel as the parameters. If the GradScaler skips the first step,
    torch later uses momentum memory that was never written. Starting at 0, the first momentum is the gradient, as
    without the hook: momentum * 0 + gradient, as dampening is 0.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.grad)


def set_learning_rate(optimizer: optim.Optimizer, learning_rate: float) -> None:
    """Set the rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
