"""Losses whose repair was once named wrongly, and losses with a threshold that ordinary batches do not reach."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def divided_by_itself(outputs: Tensor, targets: Tensor) -> Tensor:
    loss = functional.mse_loss(outputs, targets)
    return loss / loss.detach()


def divided_by_its_average(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = (outputs - targets).square().flatten(1).mean(1)
    return (losses / losses.mean().detach()).mean()


def divided_by_the_largest(outputs: Tensor, targets: Tensor) -> Tensor:
    errors = (outputs - targets).abs().flatten(1).mean(1)
    return (errors / errors.max()).mean()


def divided_by_a_detached_spread(outputs: Tensor, targets: Tensor) -> Tensor:
    errors = (outputs - targets).square().flatten(1).mean(1)
    return (errors / errors.std().detach()).mean()


def free_bits(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean(0).clamp(min=2.0).sum()


def flooded(outputs: Tensor, targets: Tensor) -> Tensor:
    return (functional.mse_loss(outputs, targets) - 2.0).abs()


def flooded_low(outputs: Tensor, targets: Tensor) -> Tensor:
    return (functional.mse_loss(outputs, targets) - 0.05).abs()


def flooded_classes(outputs: Tensor, labels: Tensor) -> Tensor:
    return (functional.cross_entropy(outputs, labels) - 0.3).abs()


def root_of_a_mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.mse_loss(outputs, targets).sqrt()


def masked_mean(outputs: Tensor, targets: Tensor) -> Tensor:
    mask = (targets > 0).to(outputs)
    return ((outputs - targets).square() * mask).sum() / mask.sum()


def correlation_of_sums(outputs: Tensor, targets: Tensor) -> Tensor:
    x, y = outputs.flatten(), targets.flatten()
    return 1 - (x * y).sum() / torch.sqrt(x.square().sum() * y.square().sum())
