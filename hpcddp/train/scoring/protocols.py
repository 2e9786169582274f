"""The two protocols of metrics: additive metrics, and metrics of all samples."""

from __future__ import annotations

from typing import Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from hpcddp.train.errors import TrainingError


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
