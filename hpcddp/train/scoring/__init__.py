"""Metrics that are exact on any number of ranks: batch contract, section 7.

A metric says what one sample contributes. Sums over samples, or the contributions of all samples by their index, are
made here, over all ranks at once; every rank gets the same value. A metric never sees which rank it is on, so that
a mean of per-rank metrics, which is wrong as soon as the ranks have other numbers of samples, cannot be written.
"""

from __future__ import annotations

from hpcddp.train.scoring.classification import AreaUnderRocCurve, CrossEntropy, TopKAccuracy
from hpcddp.train.scoring.evaluate import ValidationShare, evaluate
from hpcddp.train.scoring.protocols import AdditiveMetric, GatheredMetric, Metric, MetricError
from hpcddp.train.scoring.segmentation import MeanIoU

__all__ = [
    "AdditiveMetric",
    "AreaUnderRocCurve",
    "CrossEntropy",
    "GatheredMetric",
    "MeanIoU",
    "Metric",
    "MetricError",
    "TopKAccuracy",
    "ValidationShare",
    "evaluate",
]
