"""Merge the buffers of the ranks for evaluations and checkpoints, and collect those that differ.

Running statistics of local BatchNorm are merged over ranks; other buffers are taken from rank 0. Each rank then
continues to train with its own buffers, so that an evaluation or a save, whose time may depend on a clock or a signal,
does not change the training. A checkpoint holds the merged model, and also the buffers that differ between ranks, for
a run that is resumed with as many ranks.

Micro-batches of a fixed size are the same for every number of ranks: ``OrderedStatistics`` then gives every rank the
running statistics of one process, in every step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcddp.train.buffers import as_real, broadcast_buffers, copy_buffers, restore_buffers
from hpcddp.train.model.normalisation import local_batch_norms


class OrderedStatistics:
    """Running statistics of local BatchNorm as one process has them that takes all micro-batches in their order.

    With p = 1 - momentum and the statistics s of its K micro-batches, one process has after a step::

        r <- p^K * r + momentum * sum over k of p^(K-1-k) * s_k

    Rank q takes its k_q micro-batches after those of the ranks below it, and before the ``later_q`` of those above.
    From the same r it comes to ``r_q = p^k_q * r + c_q``, so that one process has ``p^K * r + sum over q of p^later_q *
    c_q``. Layers with momentum None have the mean over all micro-batches, of which a rank has its part of the sum.

    Args:
        model: the model; layers without running statistics are left alone.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = [layer for layer in local_batch_norms(model) if layer.num_batches_tracked is not None]
        self._layers = [layer for layer in layers if layer.running_mean is not None and layer.running_var is not None]
        self._before: tuple[Tensor, Tensor] | None = None
        self._momenta: tuple[list[float | None], Tensor] = [], torch.empty(0)

    @torch.no_grad()
    def begin(self) -> None:
        """Keep the statistics before a step; in the first one every rank takes rank 0's."""
        if not self._layers:
            return
        if self._before is None:
            for buffer in (*self._running(), *self._counts()):
                dist.broadcast(buffer, src=0)
        self._before = self._read()

    @torch.no_grad()
    def merge(self) -> None:
        """Give every rank the statistics of one process after the step. Two collectives; the host does not wait."""
        if self._before is None:
            return
        (before, count), (after, new_count) = self._before, self._read()
        steps = before.new_zeros(dist.get_world_size(), len(self._layers))
        steps[dist.get_rank()] = new_count - count
        dist.all_reduce(steps)
        total = steps.sum(dim=0)
        steps_here = steps[dist.get_rank()]
        later = steps[dist.get_rank() + 1 :].sum(dim=0)
        kept = 1 - self._momentum_of_layers()
        cumulative = kept.isnan()
        all_counted = (count + total).clamp(min=1)
        # What remains of r, of this rank's r in its own statistics, and how much of the rest counts.
        remains = torch.where(cumulative, count / all_counted, kept**total)
        remains_here = torch.where(cumulative, count / (count + steps_here).clamp(min=1), kept**steps_here)
        part = torch.where(cumulative, (count + steps_here) / all_counted, kept**later)
        added = (after - self._per_channel(remains_here) * before) * self._per_channel(part)
        dist.all_reduce(added)
        merged = torch.where(self._per_channel(total) == 0, before, self._per_channel(remains) * before + added)
        for buffer, value in _in_parts(self._running(), merged):
            buffer.copy_(value)
        for buffer, value in zip(self._counts(), (count + total).unbind(), strict=True):
            buffer.copy_(value)

    def _running(self) -> list[Tensor]:
        return _present(value for layer in self._layers for value in (layer.running_mean, layer.running_var))

    def _counts(self) -> list[Tensor]:
        return _present(layer.num_batches_tracked for layer in self._layers)

    def _read(self) -> tuple[Tensor, Tensor]:
        """Return the running statistics of all layers, and the number of micro-batches of each, float64."""
        return torch.cat([value.double() for value in self._running()]), torch.stack(self._counts()).double()

    def _momentum_of_layers(self) -> Tensor:
        """Return the momentum of each layer, NaN for None; copied to the device only where it has changed."""
        momenta = [layer.momentum for layer in self._layers]
        if momenta != self._momenta[0]:
            numbers = [math.nan if momentum is None else momentum for momentum in momenta]
            device = self._counts()[0].device
            self._momenta = momenta, torch.tensor(numbers, dtype=torch.float64, device=device)
        return self._momenta[1]

    def _per_channel(self, of_layers: Tensor) -> Tensor:
        """Return one number for each running statistic from one for each layer."""
        sizes = [2 * layer.num_features for layer in self._layers]
        return torch.cat([value.expand(size) for value, size in zip(of_layers.unbind(), sizes, strict=True)])


@contextmanager
def merged_buffers(model: nn.Module, samples: int | None) -> Iterator[None]:
    """Give every rank the same buffers within the block, and its own again afterwards.

    Args:
        samples: samples that this rank has trained on, which weight its statistics; None = they are merged already.
    """
    if dist.get_world_size() == 1:
        yield
        return
    values = copy_buffers(model)
    merged = [] if samples is None else _merged_statistics(model, samples)
    broadcast_buffers(model)
    for buffer, value in merged:
        buffer.copy_(value)
    try:
        yield
    finally:
        # A stop ends an evaluation with an exception, and saves each rank's own.
        restore_buffers(model, values)


def _merged_statistics(model: nn.Module, samples: int) -> list[tuple[Tensor, Tensor]]:
    """Return the running statistics of local BatchNorm, each with its value over all ranks.

    The mean is weighted by the counts; the variance is the variance within ranks plus the variance between them::

        m = sum(c_r * m_r) / sum(c_r)
        v = sum(c_r * (v_r + (m_r - m)^2)) / sum(c_r)
    """
    layers = [layer for layer in local_batch_norms(model) if layer.running_mean is not None]
    if not layers:
        return []
    running = _present([layer.running_mean for layer in layers]), _present([layer.running_var for layer in layers])
    means, variances = (torch.cat([value.double() for value in values]) for values in running)
    sums = torch.cat([means * samples, variances * samples, means.new_tensor([samples])])
    dist.all_reduce(sums)
    if not sums[-1]:
        return []
    mean, within = (sums[:-1] / sums[-1]).chunk(2)
    between = samples * (means - mean).square()
    dist.all_reduce(between)
    return [*_in_parts(running[0], mean), *_in_parts(running[1], within + between / sums[-1])]


def _present(buffers: Iterable[Tensor | None]) -> list[Tensor]:
    return [buffer.detach() for buffer in buffers if buffer is not None]


def _in_parts(buffers: Sequence[Tensor], flat: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(buffers, torch.split(flat, [buffer.numel() for buffer in buffers]), strict=True))


def gather_differing(models: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return, on rank 0, the buffers that differ between ranks: ``[W, ...]`` by name, one row per rank.

    Args:
        models: by the prefix of their buffers' names.

    Returns:
        An empty mapping on the other ranks.
    """
    rows: dict[str, Tensor] = {}
    if dist.get_world_size() == 1:
        return rows
    for buffers in _by_dtype(_named_buffers(models)):
        differing = _differing(buffers)
        if not differing:
            continue
        gathered = _gather(torch.cat([buffers[name].reshape(-1) for name in differing]))
        if gathered is not None:
            parts = torch.split(gathered, [buffers[name].numel() for name in differing], dim=1)
            for name, part in zip(differing, parts, strict=True):
                rows[name] = part.reshape(len(part), *buffers[name].shape).clone()
    return rows


def _named_buffers(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    for prefix, model in models.items():
        yield from ((f"{prefix}.{name}", buffer.detach()) for name, buffer in model.named_buffers())


def _by_dtype(named: Iterable[tuple[str, Tensor]]) -> Iterable[dict[str, Tensor]]:
    """Return the tensors in groups of one dtype each, so that one collective can take a group."""
    groups: dict[torch.dtype, dict[str, Tensor]] = {}
    for name, tensor in named:
        groups.setdefault(tensor.dtype, {})[name] = tensor
    return groups.values()


def _differing(buffers: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the buffers that differ from rank 0's on some rank; the same list on every rank."""
    values = torch.cat([buffer.reshape(-1) for buffer in buffers.values()])
    first = values.clone()
    dist.broadcast(as_real(first), src=0)
    parts = torch.split(first != values, [buffer.numel() for buffer in buffers.values()])
    differs = torch.stack([part.any() for part in parts]).to(torch.int64)
    dist.all_reduce(differs)
    return [name for name, count in zip(buffers, differs.tolist(), strict=True) if count]


def _gather(row: Tensor) -> Tensor | None:
    """Return the rows of all ranks, ``[W, ...]``, on rank 0; None on the others."""
    if dist.get_rank() != 0:
        dist.gather(as_real(row), dst=0)
        return None
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.gather(as_real(row), [as_real(other) for other in rows], dst=0)
    return torch.stack(rows)


def gather_samples(samples: int, device: torch.device) -> list[int]:
    """Return how many samples each rank has trained on, ``[W]``, on every rank."""
    counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor([samples], device=device))
    return [int(count) for count in counts]


@torch.no_grad()
def take_rows(models: Mapping[str, nn.Module], rows: Mapping[str, Tensor]) -> None:
    """Copy this rank's rows of ``gather_differing`` into the buffers.

    Args:
        models: by the same prefixes.
        rows: result of ``gather_differing`` on as many ranks as now.

    Raises:
        KeyError: a model has no such buffer.
    """
    buffers = dict(_named_buffers(models))
    for name, values in rows.items():
        buffers[name].copy_(values[dist.get_rank()])
