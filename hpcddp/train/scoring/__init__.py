"""Metrics that are exact on any number of ranks (batch contract, section 7).

A metric defines the contribution of one sample. The contributions are summed over the samples of all ranks, or gathered
in the order of the samples, and every rank gets the same value. A metric never computes a value per rank: the mean of
such values is wrong when the ranks have different numbers of samples.
"""

from __future__ import annotations

from hpcddp.train.scoring.evaluate import ValidationShare, evaluate
from hpcddp.train.scoring.metrics import (
    AdditiveMetric,
    AreaUnderRocCurve,
    CrossEntropy,
    GatheredMetric,
    MeanIoU,
    Metric,
    MetricError,
    TopKAccuracy,
)

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
