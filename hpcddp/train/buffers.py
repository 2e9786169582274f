"""Copy, restore and broadcast the buffers of a model, such as the running statistics of BatchNorm."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn


@contextmanager
def buffers_restored(model: nn.Module, *, exclude: Collection[nn.Module] = ()) -> Iterator[None]:
    """Restore every buffer after the block to its value before.

    Args:
        exclude: layers whose own buffers keep the values that the block gives them.
    """
    kept = {id(buffer) for layer in exclude for buffer in layer.buffers(recurse=False)}
    values = copy_buffers(model)
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(model.buffers(), values, strict=True):
                if id(buffer) not in kept:
                    buffer.copy_(value)


def copy_buffers(model: nn.Module) -> list[torch.Tensor]:
    """Return a copy of every buffer, in the model's order."""
    return [buffer.detach().clone() for buffer in model.buffers()]


@torch.no_grad()
def restore_buffers(model: nn.Module, values: list[torch.Tensor]) -> None:
    """Set every buffer to its value in ``copy_buffers``."""
    for buffer, value in zip(model.buffers(), values, strict=True):
        buffer.copy_(value)


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view that every collective takes: complex numbers as pairs of real numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


@torch.no_grad()
def broadcast_buffers(model: nn.Module) -> None:
    """Broadcast rank 0's buffers to all ranks, one collective per dtype."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for buffer in model.buffers():
        by_dtype.setdefault(buffer.dtype, []).append(buffer)
    for buffers in by_dtype.values():
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        dist.broadcast(as_real(flat), src=0)
        for buffer, part in zip(buffers, torch.split(flat, [buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(part.view_as(buffer))
