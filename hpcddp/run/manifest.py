"""What a checkpoint says about itself, and how its directory is called."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hpcddp.run.hashed_file import FileRecord

MANIFEST: Final = "manifest.json"
LATEST: Final = "latest"

_NAME = re.compile(r"step-(\d{6,})", re.ASCII)
_TEMPORARY = re.compile(r"\.step-\d{6,}\.(\d+)\.[0-9a-f]+", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint holds.

    Args:
        step: optimizer steps done.
        attempt: the attempt that wrote it.
        time: seconds since the epoch.
        contract: what a run that goes on from here must agree with.
        progress: how far the training is: epoch, samples seen, last loss and evaluation, time spent.
        information: what may change between attempts: world size, accumulation, versions.
        files: the other files, by name.
    """

    step: int
    attempt: int
    time: float
    contract: Mapping[str, Any]
    progress: Mapping[str, Any]
    information: Mapping[str, Any]
    files: Mapping[str, FileRecord]

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Manifest:
        """Return the manifest that was written as JSON."""
        files = {name: FileRecord(**record) for name, record in document["files"].items()}
        return cls(**{**document, "files": files})


def checkpoint_name(step: int) -> str:
    """Return the name of the checkpoint after ``step`` optimizer steps."""
    return f"step-{step:06d}"


def step_of(path: Path) -> int | None:
    """Return the step that a directory's name says, or None if it is no checkpoint's name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def temporary_name(step: int, attempt: int) -> str:
    """Return a new name for a checkpoint that is being written or removed by an attempt."""
    return f".{checkpoint_name(step)}.{attempt}.{secrets.token_hex(4)}"


def left_by(path: Path) -> int | None:
    """Return the attempt that a temporary name belongs to, or None if it is no such name."""
    match = _TEMPORARY.fullmatch(path.name)
    return int(match[1]) if match else None
