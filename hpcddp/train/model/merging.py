"""Merge the buffers of the ranks for evaluations and checkpoints, and collect those that differ.

Running statistics of local BatchNorm are merged over ranks; other buffers are taken from rank 0. Each rank then
continues to train with its own buffers, so that an evaluation or a save, whose time may depend on a clock or a signal,
does not change the training. A checkpoint holds the merged model, and also the buffers that differ between ranks, for
a run that is resumed with as many ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcddp.train.buffers import as_real, broadcast_buffers, copy_buffers, restore_buffers
from hpcddp.train.model.normalisation import local_batch_norms


@contextmanager
def merged_buffers(model: nn.Module, samples: int) -> Iterator[None]:
    """Give every rank the same buffers within the block, and its own again afterwards.

    Args:
        model: the model.
        samples: samples that this rank has trained on, which weight its statistics.
    """
    if dist.get_world_size() == 1:
        yield
        return
    own = copy_buffers(model)
    merged = _merged_statistics(model, samples)
    broadcast_buffers(model)
    for buffer, value in merged:
        buffer.copy_(value)
    yield
    restore_buffers(model, own)


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
    own = torch.cat([buffer.reshape(-1) for buffer in buffers.values()])
    first = own.clone()
    dist.broadcast(as_real(first), src=0)
    parts = torch.split(first != own, [buffer.numel() for buffer in buffers.values()])
    differs = torch.stack([part.any() for part in parts]).to(torch.int64)
    dist.all_reduce(differs)
    return [name for name, count in zip(buffers, differs.tolist(), strict=True) if count]


def _gather(row: Tensor) -> Tensor | None:
    """Return ``[W, ...]`` on rank 0."""
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather(as_real(row), None if rows is None else [as_real(other) for other in rows], dst=0)
    return None if rows is None else torch.stack(rows)


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
