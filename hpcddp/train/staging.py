"""A copy of a training's state, taken at a step's boundary, that is written while the training goes on.

The memory for it is taken at the first save and kept: as much as the files of a checkpoint, on the host of rank 0.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

_Place: TypeAlias = tuple[Any, ...]


class Staging:
    """Buffers in the host's memory for everything that goes into a checkpoint.

    Copies from a GPU go into pinned memory and are only ordered, by the stream that trains, before what changes the
    originals next: the host does not wait for them until ``wait_until_copied``.
    """

    def __init__(self) -> None:
        self._buffers: dict[_Place, Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    @property
    def size(self) -> int:
        """Bytes that the buffers take."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def copy(self, files: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Return a copy of the contents of files; it is good until the next call.

        Args:
            files: what ``torch.save`` is to write, by file name. Tensors are copied into the buffers; one that a file
                has twice is so in the copy.
        """
        copier = _Copier(self._buffers)
        copies = {name: copier.copy_file(name, content) for name, content in files.items()}
        self._buffers = copier.buffers
        self._copied = None
        if copier.saw_gpu:
            self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._copied.record()
        return copies

    def wait_until_copied(self) -> None:
        """Wait for what a GPU still copies."""
        if self._copied is not None:
            self._copied.synchronize()


class _Copier:
    """Copies a tree of containers, with the buffers of the time before where they fit."""

    def __init__(self, last: Mapping[_Place, Tensor]) -> None:
        self._last = last
        self._aliases: dict[_Place, Tensor] = {}
        self.buffers: dict[_Place, Tensor] = {}
        self.saw_gpu = False

    def copy_file(self, name: str, content: Mapping[str, Any]) -> Any:  # noqa: ANN401
        self._aliases.clear()
        return self._copy(content, (name,))

    def _copy(self, value: Any, place: _Place) -> Any:  # noqa: ANN401
        if isinstance(value, Tensor):
            return self._copy_tensor(value, place)
        if isinstance(value, dict):
            # A state_dict carries the versions of its modules as an attribute.
            duplicate = copy.copy(value)
            for key, item in value.items():
                duplicate[key] = self._copy(item, (*place, key))
            return duplicate
        if type(value) in (list, tuple):
            return type(value)(self._copy(item, (*place, i)) for i, item in enumerate(value))
        return copy.deepcopy(value)

    def _copy_tensor(self, value: Tensor, place: _Place) -> Tensor:
        if type(value) not in (Tensor, torch.nn.Parameter) or value.layout != torch.strided:
            return value.detach().cpu().clone()
        key = (value.data_ptr(), value.dtype, value.shape, value.stride(), value.device)
        if value.numel() and key in self._aliases:
            return self._aliases[key]
        buffer = self._last.get(place)
        if buffer is None or not _fits(buffer, value):
            buffer = _new_buffer(value)
        with torch.no_grad():
            # Any other copy must be over when the training goes on.
            buffer.copy_(value, non_blocking=buffer.is_pinned())
        self.saw_gpu |= value.is_cuda
        self.buffers[place] = self._aliases[key] = buffer
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
        # The host may let a process pin less than it has; then the copy is made at once, and slower.
        return torch.empty_like(value, device="cpu", requires_grad=False)
