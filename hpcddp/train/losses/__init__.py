"""Helpers that make losses exact on any number of ranks (batch contract, section 0).

`hpcddp doctor loss module:function` tells which helper a loss needs:

- The mean, the sum or the vector of losses per sample: :class:`DeclaredLoss`.
- A sum divided by a count that is not the number of samples: :func:`weighted_mean`.
- Any function of sums over samples (Dice, IoU, correlation): :func:`additive_loss`.
- A loss that compares samples with each other (contrastive): :func:`gather_with_grad`.

With gradient accumulation, :func:`accumulate_additive` makes the two passes that a function of sums needs.
"""

from __future__ import annotations

from hpcddp.train.errors import LossError
from hpcddp.train.losses.additive import accumulate_additive, additive_loss, sum_statistics, weighted_mean
from hpcddp.train.losses.declared import DeclaredLoss, Reduction, Share, ShareLoss
from hpcddp.train.losses.ranks import gather_with_grad

__all__ = [
    "DeclaredLoss",
    "LossError",
    "Reduction",
    "Share",
    "ShareLoss",
    "accumulate_additive",
    "additive_loss",
    "gather_with_grad",
    "sum_statistics",
    "weighted_mean",
]
