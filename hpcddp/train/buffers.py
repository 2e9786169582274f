"""A model's buffers, such as BatchNorm's running statistics: put back after a placeholder, taken from rank 0."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn


@contextmanager
def buffers_put_back(model: nn.Module, *, but: Collection[nn.Module] = ()) -> Iterator[None]:
    """Give every buffer the value that it had before the block.

    Args:
        model: the model.
        but: layers whose own buffers stay as the block leaves them.
    """
    kept = {id(buffer) for layer in but for buffer in layer.buffers(recurse=False)}
    before = copy_buffers(model)
    yield
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), before, strict=True):
            if id(buffer) not in kept:
                buffer.copy_(value)


def copy_buffers(model: nn.Module) -> list[torch.Tensor]:
    """Return a copy of every buffer, in the model's order."""
    return [buffer.detach().clone() for buffer in model.buffers()]


@torch.no_grad()
def restore_buffers(model: nn.Module, values: list[torch.Tensor]) -> None:
    """Give every buffer a value of ``copy_buffers``."""
    for buffer, value in zip(model.buffers(), values, strict=True):
        buffer.copy_(value)


@torch.no_grad()
def broadcast_buffers(model: nn.Module) -> None:
    """Give every rank the buffers of rank 0: one collective per number format."""
    by_format: dict[torch.dtype, list[torch.Tensor]] = {}
    for buffer in model.buffers():
        by_format.setdefault(buffer.dtype, []).append(buffer)
    for buffers in by_format.values():
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        dist.broadcast(flat, src=0)
        for buffer, part in zip(buffers, torch.split(flat, [buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(part.view_as(buffer))
