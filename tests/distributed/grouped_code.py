"""Functions and models of a user for batches of groups, and for BatchNorm over micro-batches of one size."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn


def uneven_groups(index: int) -> int:
    """Return a group of 1, 4, 5 or more samples: quadratic residues are not equally frequent."""
    return index * index % 23


def ghost_model(num_classes: int) -> nn.Module:
    """Return a model with BatchNorm and without dropout."""
    return nn.Sequential(
        nn.AvgPool2d(4),
        nn.Flatten(),
        nn.Linear(3 * 8 * 8, 16),
        nn.BatchNorm1d(16),
        nn.Tanh(),
        nn.Linear(16, num_classes),
    )


def cumulative_ghost_model(num_classes: int) -> nn.Module:
    """Return the same with the mean over all micro-batches, and with statistics that stay as they are."""

    class Fixed(nn.BatchNorm1d):
        def train(self, mode: bool = True) -> Fixed:  # noqa: FBT001, FBT002  torch's signature
            del mode
            return super().train(mode=False)

    return nn.Sequential(
        nn.AvgPool2d(4),
        nn.Flatten(),
        nn.Linear(3 * 8 * 8, 16),
        nn.BatchNorm1d(16, momentum=None),
        nn.Tanh(),
        Fixed(16),
        nn.Linear(16, num_classes),
    )


def groups_of_the_rank(index: int) -> int:
    """Return other groups on every rank."""
    return index // (3 + dist.get_rank())
