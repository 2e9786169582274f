"""A checkpoint in memory: the state of a training that goes on in the same processes, and how one rank sends it."""

from __future__ import annotations

import io
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpcddp.run.checkpoints import Checkpoint, Manifest
from hpcddp.train.data.identity import tensor_bytes
from hpcddp.train.waits import WAITS


@dataclass(frozen=True, slots=True)
class MemoryCheckpoint(Checkpoint):
    """A checkpoint that is on no disk.

    Args:
        contents: the content of each file, by its name.
    """

    contents: Mapping[str, Any]

    @classmethod
    def of(cls, manifest: Manifest, contents: Mapping[str, Any]) -> MemoryCheckpoint:
        """Return the checkpoint of a state."""
        return cls(Path(f"the state after step {manifest.step}"), manifest, contents)

    def checksum(self) -> int:
        """Return the CRC-32 of all contents: parameters, buffers, optimizer, scaler and averaged weights.

        It is the same on all ranks that have the same state. It always tells of a difference within 32 bits in a row,
        and misses any other one with a probability of 2^-32.
        """
        return _checksum(self.contents, 0)


def _checksum(value: object, begin: int) -> int:
    """Return the CRC-32 of what has the CRC-32 ``begin``, followed by a value."""
    if isinstance(value, torch.Tensor):
        return zlib.crc32(tensor_bytes(value), begin)
    if isinstance(value, Mapping):
        # Ranks may have added the keys in another order.
        for key in sorted(value, key=str):
            begin = zlib.crc32(str(key).encode(), begin)
            begin = _checksum(value[key], begin)
        return begin
    if isinstance(value, list | tuple):
        for item in value:
            begin = _checksum(item, begin)
        return begin
    return zlib.crc32(repr(value).encode(), begin)


def broadcast_checkpoint(checkpoint: MemoryCheckpoint | None, source: int) -> MemoryCheckpoint:
    """Return the checkpoint of one rank on every rank; a collective.

    Args:
        checkpoint: that of this rank; only the source needs one.
        source: the rank that sends its own.
    """
    content = b""
    if dist.get_rank() == source and checkpoint is not None:
        stream = io.BytesIO()
        torch.save({"manifest": asdict(checkpoint.manifest), "contents": dict(checkpoint.contents)}, stream)
        content = stream.getvalue()
    size = torch.tensor([len(content)])
    WAITS.run(dist.broadcast, size, src=source)
    data = torch.empty(int(size), dtype=torch.uint8)
    if content:
        data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    WAITS.run(dist.broadcast, data, src=source)
    if checkpoint is not None and dist.get_rank() == source:
        return checkpoint
    document = torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)
    return MemoryCheckpoint.of(Manifest(**document["manifest"]), document["contents"])
