"""A checkpoint in memory: the state of a training that goes on in the same processes, and how one rank sends it."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpcddp.run.checkpoints import Checkpoint, Manifest


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
    dist.broadcast(size, src=source)
    data = torch.empty(int(size), dtype=torch.uint8)
    if content:
        data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    dist.broadcast(data, src=source)
    if checkpoint is not None and dist.get_rank() == source:
        return checkpoint
    document = torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)
    return MemoryCheckpoint.of(Manifest(**document["manifest"]), document["contents"])
