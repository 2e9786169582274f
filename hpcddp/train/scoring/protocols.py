"""What a metric is: two kinds, told apart by their methods."""

from __future__ import annotations

from typing import Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from hpcddp.train.errors import TrainingError


class MetricError(TrainingError):
    """A metric, or what it is given, does not describe every sample once."""

    kind = "metric"


@runtime_checkable
class AdditiveMetric(Protocol):
    """A function of sums over samples: accuracy, mean loss, IoU of a confusion matrix."""

    def statistics(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return what each sample adds to the sums.

        Args:
            outputs: of the model, ``[n, ...]``, n >= 1.
            targets: ``[n, ...]``.

        Returns:
            ``[n, k]`` or ``[n]``, with the same k for every batch; any number format, summed in float64.
        """
        ...

    def from_sums(self, sums: Tensor, samples: int) -> float:
        """Return the value.

        Args:
            sums: over all samples of all ranks, ``[k]``, float64, on the CPU.
            samples: how many there are.
        """
        ...


@runtime_checkable
class GatheredMetric(Protocol):
    """A function of all samples together, which no sum replaces: area under the ROC curve, rank correlation.

    What is kept of the samples lies in the memory of every rank, 8 k N bytes: keep little of each.
    """

    def rows(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return what to keep of each sample.

        Args:
            outputs: of the model, ``[n, ...]``, n >= 1.
            targets: ``[n, ...]``.

        Returns:
            ``[n, k]`` or ``[n]``, with the same k for every batch; numbers that float64 holds.
        """
        ...

    def from_rows(self, rows: Tensor) -> float:
        """Return the value.

        Args:
            rows: of all samples, in the order of their index, ``[N, k]``, float64, on the CPU.
        """
        ...


Metric: TypeAlias = AdditiveMetric | GatheredMetric
