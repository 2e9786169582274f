"""Sum or gather the metrics of each validation sample once, over all ranks (batch contract, section 7)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from hpcddp.batch.split import offset, part
from hpcddp.train import distributed
from hpcddp.train.errors import describe
from hpcddp.train.losses.ranks import add_over_ranks
from hpcddp.train.scoring.metrics import AdditiveMetric, Metric, MetricError


class Tally:
    """The contributions of the samples of one rank.

    Args:
        samples: N, over all ranks.
        device: device of the contributions.
    """

    def __init__(self, metrics: Mapping[str, Metric], samples: int, device: torch.device) -> None:
        self._metrics = metrics
        self._samples = samples
        self._device = device
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
        values: dict[str, float] = {}
        begin = 1
        for (name, metric), width in zip(self._metrics.items(), widths, strict=True):
            if isinstance(metric, AdditiveMetric):
                end = begin + width
                values[name] = metric.from_sums(total[begin:end], self._samples)
            else:
                end = begin + self._samples * width
                values[name] = metric.from_rows(total[begin:end].view(self._samples, width))
            begin = end
        return values


# The vote of a rank without samples: smaller than every width and its negative, so that it never is the maximum.
_NO_VOTE: Final = -(1 << 62)


class ValidationShare:
    """The validation samples of this rank, in batches: contiguous, and equal over ranks up to one sample.

    Together the ranks have every sample exactly once; some have none when there are fewer samples than ranks. It can be
    the ``batch_sampler`` of a ``DataLoader``.

    Args:
        samples: N >= 1, samples of the validation part.
        batch_size: the most samples in one batch, >= 1.
        group: the process group; None = the default one, or one process where none is open.
        rank: the rank; None = this process's rank in the group.
        ranks: the number of ranks; None = the size of the group.
    """

    def __init__(
        self,
        samples: int,
        batch_size: int,
        *,
        group: dist.ProcessGroup | None = None,
        rank: int | None = None,
        ranks: int | None = None,
    ) -> None:
        rank = distributed.rank(group) if rank is None else rank
        ranks = distributed.world_size(group) if ranks is None else ranks
        if samples < 1 or batch_size < 1:
            raise ValueError(f"a share has samples >= 1 and batch_size >= 1, not {samples} and {batch_size}")
        self.samples = samples
        first = offset(samples, ranks, rank)
        mine = range(first, first + part(samples, ranks, rank))
        self._batches = [mine[start : start + batch_size] for start in range(0, len(mine), batch_size)]

    def __len__(self) -> int:
        """Return how many batches there are."""
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of each batch."""
        return map(list, self._batches)


def evaluate(
    share: ValidationShare,
    results: Iterable[tuple[Tensor, Tensor]],
    metrics: Mapping[str, Metric],
    *,
    device: torch.device | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, float]:
    """Return the value of every metric over the whole validation part, the same on every rank.

    A collective: every rank calls it with the same metrics, also ranks without samples. Two tensors are reduced over
    the ranks::

        share = ValidationShare(len(validation), batch_size=64)
        loader = DataLoader(validation, batch_sampler=share)
        model.eval()
        values = evaluate(share, ((model(x), y) for x, y in loader), {"top1": TopKAccuracy(1)})

    Args:
        share: the samples of this rank.
        results: outputs and targets of each batch of the share, in its order; iterated without gradient.
        device: device of the sums; None = the current GPU if the group uses NCCL, else the CPU.
        group: the process group; None = the default one, or one process where none is open.

    Raises:
        MetricError: there are too few or too many batches, or a metric does not return one row per sample.
    """
    tally = Tally(metrics, share.samples, device or distributed.collective_device(group))
    with torch.no_grad():
        _take_all(tally, share, results)
    widths = _agree_on_widths(tally, list(metrics), device or distributed.collective_device(group), group)
    vector = tally.vector(widths)
    add_over_ranks(vector, group)
    return tally.values(vector.cpu(), widths)


def _take_all(tally: Tally, share: ValidationShare, results: Iterable[tuple[Tensor, Tensor]]) -> None:
    taken = iter(results)
    for number, indices in enumerate(share):
        result = next(taken, None)
        if result is None:
            raise MetricError(
                f"there are results of {number} batches, and the share of this rank has {len(share)}; give them all"
            )
        tally.add(indices, *result)
    if next(taken, None) is not None:
        raise MetricError(
            f"there are results of more than the {len(share)} batches of this rank's share; give each batch once"
        )


def _agree_on_widths(
    tally: Tally, names: list[str], device: torch.device, group: dist.ProcessGroup | None
) -> list[int]:
    """Return k of every metric, which a rank without samples learns from the others."""
    widths = tally.widths()
    # All ranks have the same k if and only if max(k) equals -max(-k).
    votes = torch.tensor([[k, -k] if k else [_NO_VOTE, _NO_VOTE] for k in widths], device=device).reshape(-1)
    if dist.is_initialized() and widths:
        dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=group)
    pairs: list[list[int]] = votes.view(-1, 2).tolist()
    for name, (largest, smallest) in zip(names, pairs, strict=True):
        if largest != -smallest:
            raise MetricError(
                f"metric {name} returns {-smallest} numbers per sample on one rank and {largest} on another; return as "
                "many for every batch"
            )
    return [largest for largest, _ in pairs]
