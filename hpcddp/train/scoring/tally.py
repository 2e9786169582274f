"""Contributions of one rank's samples to metrics, in one vector whose sum over ranks gives all values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hpcddp.train.losses.errors import describe
from hpcddp.train.scoring.protocols import AdditiveMetric, Metric, MetricError


class Tally:
    """The contributions of the samples of one rank.

    Args:
        metrics: by name.
        samples: N, over all ranks.
        device: device of the contributions.
    """

    def __init__(self, metrics: Mapping[str, Metric], samples: int, device: torch.device) -> None:
        self._metrics, self._samples, self._device = metrics, samples, device
        self._counted = 0
        self._sums: dict[str, Tensor] = {}
        self._rows: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in metrics}

    def add(self, indices: Sequence[int], outputs: Tensor, targets: Tensor) -> None:
        """Add the contributions of a batch.

        Args:
            indices: indices of its samples, 0..N-1.
            outputs: outputs of the model, ``[n, ...]``.
            targets: ``[n, ...]``.

        Raises:
            MetricError: the number of outputs, targets or contributions is not the number of samples.
        """
        for what, tensor in (("outputs", outputs), ("targets", targets)):
            if len(tensor) != len(indices):
                raise MetricError(
                    f"the {what} of a batch of {len(indices)} samples are {describe(tensor)}; give one for each "
                    "sample, in the order of the share"
                )
        self._counted += len(indices)
        places = torch.as_tensor(indices, device=self._device)
        for name, metric in self._metrics.items():
            if isinstance(metric, AdditiveMetric):
                added = self._contributions(name, metric.statistics(outputs, targets), len(indices)).sum(dim=0)
                self._sums[name] = self._sums[name] + added if name in self._sums else added
            else:
                rows = self._contributions(name, metric.rows(outputs, targets), len(indices))
                self._rows[name].append((places, rows))

    def _contributions(self, name: str, values: Tensor, samples: int) -> Tensor:
        if values.ndim not in (1, 2) or len(values) != samples:
            raise MetricError(
                f"metric {name} returns {describe(values)} for {samples} samples; return one row for each sample, a "
                f"tensor of shape ({samples}, k): sums and means are made over all ranks"
            )
        if values.is_complex():
            raise MetricError(
                f"metric {name} returns {str(values.dtype).removeprefix('torch.')} values, and they are summed in "
                "float64, which would lose their imaginary part; return real ones"
            )
        return values.detach().to(self._device, torch.float64).reshape(samples, -1)

    def widths(self) -> list[int]:
        """Return k of every metric; 0 if this rank has no samples."""
        return [self._width(name) for name in self._metrics]

    def _width(self, name: str) -> int:
        if name in self._sums:
            return len(self._sums[name])
        return self._rows[name][0][1].shape[1] if self._rows[name] else 0

    def vector(self, widths: Sequence[int]) -> Tensor:
        """Return the number of samples and all contributions in one float64 vector, 0 for samples of other ranks.

        Args:
            widths: k of every metric.
        """
        parts = [torch.tensor([float(self._counted)], dtype=torch.float64, device=self._device)]
        for (name, metric), width in zip(self._metrics.items(), widths, strict=True):
            if isinstance(metric, AdditiveMetric):
                parts.append(self._sums.get(name, parts[0].new_zeros(width)))
            else:
                table = parts[0].new_zeros(self._samples, width)
                for places, rows in self._rows[name]:
                    table[places] = rows
                parts.append(table.reshape(-1))
        return torch.cat(parts)

    def values(self, total: Tensor, widths: Sequence[int]) -> dict[str, float]:
        """Return the value of every metric.

        Args:
            total: the sum of ``vector`` over all ranks, on the CPU.
            widths: k of every metric.

        Raises:
            MetricError: some samples were not counted, or counted twice.
        """
        counted = int(total[0])
        if counted != self._samples:
            raise MetricError(
                f"{counted} samples were evaluated over all ranks, and there are {self._samples}; give every rank its "
                "own ValidationShare of the same samples, and evaluate all of its batches"
            )
        found: dict[str, float] = {}
        begin = 1
        for (name, metric), width in zip(self._metrics.items(), widths, strict=True):
            additive = isinstance(metric, AdditiveMetric)
            end = begin + (width if additive else self._samples * width)
            part = total[begin:end]
            found[name] = (
                metric.from_sums(part, self._samples)
                if isinstance(metric, AdditiveMetric)
                else metric.from_rows(part.view(self._samples, width))
            )
            begin = end
        return found
