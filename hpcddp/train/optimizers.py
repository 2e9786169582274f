"""The optimizers of the job file."""

from __future__ import annotations

from torch import nn, optim

from hpcddp.spec.job import Optimizer


def build_optimizer(spec: Optimizer, model: nn.Module, *, learning_rate: float, device_type: str) -> optim.Optimizer:
    """Return an optimizer over the parameters that require a gradient.

    Args:
        spec: the job's ``train.optimizer``.
        model: the model, on its device already.
        learning_rate: the rate of the first step; every step sets its own.
        device_type: ``cuda`` takes the fused kernels, one launch for all parameters.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    fused = device_type == "cuda" or None
    if spec.name == "adamw":
        return optim.AdamW(
            parameters, lr=learning_rate, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay, fused=fused
        )
    return optim.SGD(
        parameters,
        lr=learning_rate,
        momentum=spec.momentum,
        weight_decay=spec.weight_decay,
        nesterov=spec.nesterov,
        fused=fused,
    )


def set_learning_rate(optimizer: optim.Optimizer, learning_rate: float) -> None:
    """Set the rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
