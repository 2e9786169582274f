"""The two protocols of metrics, additive metrics and metrics of all samples, and the built-in ones."""

from __future__ import annotations

import math
from typing import Final, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from hpcddp.train.errors import TrainingError, describe


class MetricError(TrainingError):
    """A metric or its input does not cover every sample exactly once."""

    kind = "metric"


@runtime_checkable
class AdditiveMetric(Protocol):
    """A function of sums over samples: accuracy, mean loss, IoU of a confusion matrix."""

    def statistics(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the contribution of each sample to the sums.

        Args:
            outputs: outputs of the model, ``[n, ...]``, n >= 1.
            targets: ``[n, ...]``.

        Returns:
            ``[n, k]`` or ``[n]``, with the same k for every batch; any real dtype, summed in float64.
        """
        ...

    def from_sums(self, sums: Tensor, samples: int) -> float:
        """Return the value.

        Args:
            sums: over all samples of all ranks, ``[k]``, float64, on the CPU.
            samples: N, samples of all ranks.
        """
        ...


@runtime_checkable
class GatheredMetric(Protocol):
    """A function of all samples that is no function of sums: area under the ROC curve, rank correlation.

    The rows of all samples take 8 k N bytes of memory on every rank, so rows should be short.
    """

    def rows(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the row of each sample.

        Args:
            outputs: outputs of the model, ``[n, ...]``, n >= 1.
            targets: ``[n, ...]``.

        Returns:
            ``[n, k]`` or ``[n]``, with the same k for every batch; values that float64 can represent.
        """
        ...

    def from_rows(self, rows: Tensor) -> float:
        """Return the value.

        Args:
            rows: of all samples, in the order of their index, ``[N, k]``, float64, on the CPU.
        """
        ...


Metric: TypeAlias = AdditiveMetric | GatheredMetric


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
        target_scores = outputs.gather(1, targets.unsqueeze(1))
        classes = torch.arange(outputs.shape[1], device=outputs.device)
        below = (outputs < target_scores) | ((outputs == target_scores) & (classes > targets.unsqueeze(1)))
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
        scores = rows[:, 0]
        positive = rows[:, 1] > 0
        positives = int(positive.sum())
        negatives = len(rows) - positives
        if positives * negatives == 0 or bool(scores.isnan().any()):
            return math.nan
        _, positions, count = torch.unique(scores, return_inverse=True, return_counts=True)
        mid_ranks = count.cumsum(0).double() - (count.double() - 1) / 2
        rank_sum = float(mid_ranks[positions][positive].sum())
        return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)


_LEAST_DIMENSIONS: Final = 2  # samples and classes


class MeanIoU:
    """The intersection over union of the whole validation part, averaged over classes; an :class:`AdditiveMetric`.

    ``IoU(c) = pixels that are c in both / pixels that are c in either``, summed over all samples *before* the division
    (Everingham et al. 2010, PASCAL VOC). A class that occurs in no label and no prediction has no IoU and is left out;
    the value is NaN if no class occurs. It is not the mean of the samples' IoUs.

    Args:
        classes: K >= 1.
        ignore_index: pixels with this label do not count; None = all count.
    """

    def __init__(self, classes: int, ignore_index: int | None = None) -> None:
        self._classes = classes
        self._ignore_index = ignore_index

    def statistics(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return pixels of intersection and union of each class, ``[n, 2 K]``.

        Args:
            outputs: logits ``[n, K, ...]``.
            targets: labels ``[n, ...]``, integers.

        Raises:
            MetricError: the shapes do not match, or a label is not in 0..K-1.
        """
        no_classes = outputs.ndim < _LEAST_DIMENSIONS
        if no_classes or (len(targets), self._classes, *targets.shape[1:]) != outputs.shape:
            raise MetricError(
                f"the mean IoU of {self._classes} classes is given outputs of shape {tuple(outputs.shape)} for labels "
                f"of shape {tuple(targets.shape)}; give logits of shape [n, {self._classes}, ...] and labels [n, ...]"
            )
        labels = targets.reshape(len(targets), -1)
        predicted = outputs.argmax(dim=1).reshape(len(targets), -1)
        if self._ignore_index is None:
            counts = torch.ones_like(labels, dtype=torch.bool)
        else:
            counts = labels != self._ignore_index
        self._refuse_other_labels(labels[counts])
        both = self._count(labels, counts & (labels == predicted))
        either = self._count(labels, counts) + self._count(predicted, counts) - both
        return torch.cat([both, either], dim=1)

    def _refuse_other_labels(self, labels: Tensor) -> None:
        if labels.numel() and (int(labels.min()) < 0 or int(labels.max()) >= self._classes):
            raise MetricError(
                f"the mean IoU of {self._classes} classes is given labels {int(labels.min())}..{int(labels.max())}; "
                f"give labels 0..{self._classes - 1}, and the label of pixels that do not count as ignore_index"
            )

    def _count(self, classes: Tensor, counts: Tensor) -> Tensor:
        """Return how many counted pixels of each sample are of each class, ``[n, K]``."""
        samples = torch.arange(len(classes), device=classes.device).unsqueeze(1)
        keys = (samples * self._classes + classes)[counts]
        return torch.bincount(keys, minlength=len(classes) * self._classes).view(len(classes), self._classes)

    def from_sums(self, sums: Tensor, samples: int) -> float:  # noqa: ARG002  part of the protocol
        """Return the mean over the classes that occur."""
        both, either = sums.view(2, self._classes)
        occurs = either > 0
        if not bool(occurs.any()):
            return math.nan
        return float((both[occurs] / either[occurs]).mean())
