"""Metric of segmentations: mean intersection over union."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from hpcddp.train.scoring.protocols import MetricError

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
        self._classes, self._ignore_index = classes, ignore_index

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
        labels, found = targets.reshape(len(targets), -1), outputs.argmax(dim=1).reshape(len(targets), -1)
        counts = (
            torch.ones_like(labels, dtype=torch.bool) if self._ignore_index is None else labels != self._ignore_index
        )
        self._refuse_other_labels(labels[counts])
        both = self._count(labels, counts & (labels == found))
        either = self._count(labels, counts) + self._count(found, counts) - both
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
        return float((both[occurs] / either[occurs]).mean()) if bool(occurs.any()) else math.nan
