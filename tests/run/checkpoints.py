"""Writes checkpoints, and damages their files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import IO

from hpcddp.run.checkpoints import Checkpoint, Manifest
from hpcddp.run.publish import advance_latest, publish


def manifest(step: int, attempt: int = 0) -> Manifest:
    return Manifest(
        step=step,
        attempt=attempt,
        time=1.5,
        contract={"seed": 1},
        progress={"epoch": 2},
        information={"world_size": 3},
        files={},
    )


def write(content: bytes) -> Callable[[IO[bytes]], None]:
    def writer(stream: IO[bytes]) -> None:
        stream.write(content)

    return writer


def nothing() -> None:
    pass


def save(directory: Path, step: int, content: bytes = b"state") -> Checkpoint:
    writers = {"a.bin": write(content), "b.bin": write(b"more")}
    published = publish(directory, manifest(step), writers, may_publish=nothing)
    advance_latest(directory, step, may_publish=nothing)
    return published


def with_flipped_bit(content: bytes, bit: int) -> bytes:
    flipped = bytearray(content)
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)


def flip(path: Path, part: bytes, bit: int) -> None:
    """Flip a bit of a part of a file, counted from the part's beginning."""
    replace(path, part, with_flipped_bit(part, bit))


def replace(path: Path, part: bytes, by: bytes) -> None:
    content = path.read_bytes()
    assert content.count(part) == 1 or part == b'"sha256": '
    path.write_bytes(content.replace(part, by, 1))


def correct_checksum(path: Path) -> None:
    """Write the checksum of a checkpoint's manifest that fits its other lines."""
    first, _, rest = (path / "manifest.json").read_text().split("\n", 2)
    checksum = hashlib.sha256(rest.encode()).hexdigest()
    (path / "manifest.json").write_text(f'{first}\n  "sha256": "{checksum}",\n{rest}')
