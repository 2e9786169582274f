"""Metrics of classifiers: top-k accuracy, cross entropy, area under the ROC curve."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from hpcddp.train.losses.errors import describe
from hpcddp.train.scoring.protocols import MetricError


class TopKAccuracy:
    """The fraction of samples whose label is among the k largest logits; an :class:`AdditiveMetric`.

    Of equal logits, the one of the smaller class counts as larger, so that the value does not depend on the device. A
    NaN logit counts as larger than the label's logit; if the label's logit is NaN, it counts as the smallest.

    Args:
        k: >= 1; 1 is accuracy.
    """

    def __init__(self, k: int) -> None:
        if k < 1:
            raise ValueError(f"k is 1 or more, not {k}")
        self.k = k

    def statistics(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return 1 where the label is among the k largest of the logits ``[n, K]``, else 0: ``[n]``."""
        own = outputs.gather(1, targets.unsqueeze(1))
        classes = torch.arange(outputs.shape[1], device=outputs.device)
        below = (outputs < own) | ((outputs == own) & (classes > targets.unsqueeze(1)))
        return (outputs.shape[1] - 1 - below.sum(dim=1)) < self.k

    def from_sums(self, sums: Tensor, samples: int) -> float:
        """Return the fraction."""
        return float(sums) / samples


class CrossEntropy:
    """The mean cross entropy per sample, without label smoothing; an :class:`AdditiveMetric`."""

    def statistics(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each sample, ``[n]``, from logits ``[n, K]``; computed in float32 or float64."""
        wide = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        return functional.cross_entropy(wide, targets, reduction="none")

    def from_sums(self, sums: Tensor, samples: int) -> float:
        """Return the mean."""
        return float(sums) / samples


class AreaUnderRocCurve:
    """The area under the ROC curve of two classes; a :class:`GatheredMetric`.

    It is the probability that a positive sample has a larger score than a negative one, a tie counting half (Hanley and
    McNeil 1982): ``(R - P (P + 1) / 2) / (P * Q)`` with P positive and Q negative samples and R the sum of the positive
    ones' mid-ranks. The value is NaN if one of the classes does not occur, or if a score is NaN.
    """

    def rows(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return score and class of each sample, ``[n, 2]``.

        Args:
            outputs: scores ``[n]`` or ``[n, 1]``, larger for the positive class.
            targets: ``[n]`` or ``[n, 1]``, 1 for the positive class and 0 for the negative one.

        Raises:
            MetricError: there is not one score per sample.
        """
        scores = outputs.reshape(len(outputs), -1)
        if scores.shape[1] != 1:
            raise MetricError(
                f"the area under the ROC curve is given {describe(outputs)}, and it needs one score for each sample; "
                "of two logits give outputs[:, 1] - outputs[:, 0]"
            )
        return torch.cat([scores.double(), targets.reshape(len(targets), -1).double()], dim=1)

    def from_rows(self, rows: Tensor) -> float:
        """Return the area."""
        scores, positive = rows[:, 0], rows[:, 1] > 0
        positives = int(positive.sum())
        negatives = len(rows) - positives
        if positives * negatives == 0 or bool(scores.isnan().any()):
            return math.nan
        _, place, count = torch.unique(scores, return_inverse=True, return_counts=True)
        mid_ranks = count.cumsum(0).double() - (count.double() - 1) / 2
        rank_sum = float(mid_ranks[place][positive].sum())
        return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)
