"""Copy the state of a training between two steps, so that it can be written while the training continues.

The buffers are allocated at the first save and kept. They take as much memory as the files of a checkpoint, on rank 0.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

_TreePath: TypeAlias = tuple[Any, ...]


class Staging:
    """Buffers in host memory for the content of a checkpoint; those of the last copy are used again where they fit.

    Copies from a GPU go to pinned memory, asynchronously on the stream of the training, and so before the next change
    of the originals. The host waits for them only in ``wait_until_copied``.
    """

    def __init__(self) -> None:
        self._buffers: dict[_TreePath, Tensor] = {}
        self._new_buffers: dict[_TreePath, Tensor] = {}
        # Of one file: what has been copied, by the memory that it was in.
        self._aliases: dict[_TreePath, Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    def copy(self, files: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Return a copy of the contents of files, which is valid until the next call.

        Args:
            files: the objects for ``torch.save``, by file name. Tensors are copied into the buffers. A tensor that
                occurs twice in a file is copied once and shared. Numbers of numpy become Python's.
        """
        copies = {}
        for name, content in files.items():
            self._aliases.clear()
            copies[name] = self._copy(content, (name,))
        self._buffers = self._new_buffers
        self._new_buffers = {}
        self._copied = None
        if any(buffer.is_pinned() for buffer in self._buffers.values()):
            # torch leaves the class without types.
            new_event: Callable[..., torch.cuda.Event] = torch.cuda.Event
            self._copied = new_event(blocking=True)
            self._copied.record()
        return copies

    def wait_until_copied(self) -> None:
        """Wait until the copies from a GPU are complete."""
        if self._copied is not None:
            self._copied.synchronize()

    def _copy(self, value: object, path: _TreePath) -> object:
        if isinstance(value, Tensor):
            return self._copy_tensor(value, path)
        if isinstance(value, dict):
            # copy.copy keeps attributes, such as the metadata of a state_dict.
            duplicate = copy.copy(value)
            for key, item in value.items():
                duplicate[key] = self._copy(item, (*path, key))
            return duplicate
        if type(value) is list:
            return [self._copy(item, (*path, i)) for i, item in enumerate(value)]
        if type(value) is tuple:
            return tuple(self._copy(item, (*path, i)) for i, item in enumerate(value))
        if isinstance(value, np.generic):
            # A learning rate from numpy; torch would not load it again.
            return value.item()
        return copy.deepcopy(value)

    def _copy_tensor(self, value: Tensor, path: _TreePath) -> Tensor:
        if type(value) not in (Tensor, torch.nn.Parameter) or value.layout != torch.strided:
            return value.detach().cpu().clone()
        key = (
            value.data_ptr(), value.dtype, value.shape, value.stride(), value.device, value.is_conj(), value.is_neg(),
        )  # fmt: skip
        if value.numel() and key in self._aliases:
            return self._aliases[key]
        buffer = self._buffers.get(path)
        if buffer is None or not _fits(buffer, value):
            buffer = _new_buffer(value)
        with torch.no_grad():
            # Copies to unpinned memory must be complete before the training continues.
            buffer.copy_(value, non_blocking=buffer.is_pinned())
        self._new_buffers[path] = self._aliases[key] = buffer
        return buffer


def _fits(buffer: Tensor, value: Tensor) -> bool:
    return (buffer.dtype, buffer.shape) == (value.dtype, value.shape) and (
        buffer.stride() == torch.empty_like(value, device="meta").stride()
    )


def _new_buffer(value: Tensor) -> Tensor:
    try:
        return torch.empty_like(value, device="cpu", requires_grad=False, pin_memory=value.is_cuda)
    except RuntimeError:
        if not value.is_cuda:
            raise
        # The host may limit pinned memory; without it the copy is synchronous and slower.
        return torch.empty_like(value, device="cpu", requires_grad=False)
