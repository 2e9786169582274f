"""Reading checkpoints: directories ``step-000123`` that are whole or not there. Standard library alone.

Readers trust manifests, never ``latest`` alone.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from hpcddp.errors import HpcddpError
from hpcddp.run.files import read_json
from hpcddp.run.hashed_file import FileRecord
from hpcddp.run.manifest import LATEST, MANIFEST, Manifest, step_of
from hpcddp.stop.exit_codes import ExitCode

_BLOCK = 1 << 20


class NoCheckpointError(HpcddpError):
    """There should be a checkpoint to go on from, and none is valid."""

    kind = "no_checkpoint"
    exit_code: ClassVar[int] = ExitCode.NO_CHECKPOINT


class InvalidCheckpointError(HpcddpError):
    """A checkpoint is torn or rotten, or no checkpoint at all."""

    kind = "invalid_checkpoint"
    exit_code: ClassVar[int] = ExitCode.INFRASTRUCTURE


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that has been verified.

    Args:
        path: its directory.
        manifest: its manifest.
    """

    path: Path
    manifest: Manifest


def verify(path: Path) -> Checkpoint:
    """Return a checkpoint whose files are what its manifest says.

    Raises:
        InvalidCheckpointError: names what is wrong.
        OSError: the disk cannot be read.
    """
    try:
        document = read_json(path / MANIFEST)
        if document is None:
            raise InvalidCheckpointError(f"{path} has no {MANIFEST}")
        manifest = Manifest.from_document(document)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidCheckpointError(f"{path / MANIFEST} is damaged ({type(error).__name__}: {error})") from error
    if manifest.step != step_of(path):
        raise InvalidCheckpointError(f"{path / MANIFEST} is of step {manifest.step}, not of its directory's")
    for name, record in manifest.files.items():
        _verify_file(path / name, record)
    return Checkpoint(path, manifest)


def _verify_file(path: Path, record: FileRecord) -> None:
    try:
        size = path.stat().st_size
    except FileNotFoundError as error:
        raise InvalidCheckpointError(f"{path} is missing") from error
    if size != record.size:
        raise InvalidCheckpointError(f"{path} has {size} bytes, not the {record.size} of its manifest")
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    if digest.hexdigest() != record.sha256:
        raise InvalidCheckpointError(f"{path} has another sha256 than its manifest says")


def valid_or_none(path: Path) -> Checkpoint | None:
    """Return a checkpoint if its files are what its manifest says, else None."""
    try:
        return verify(path)
    except InvalidCheckpointError:
        return None


def list_checkpoints(directory: Path) -> list[Path]:
    """Return the directories that are named like checkpoints, the newest first; nothing is verified."""
    if not directory.is_dir():
        return []
    named = [(step, path) for path in directory.iterdir() if (step := step_of(path)) is not None]
    return [path for _, path in sorted(named, reverse=True)]


def newest_valid(directory: Path, *, expected: bool, warn: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest checkpoint that is whole, or None if there never was one.

    Args:
        directory: the folder of checkpoints; need not exist.
        expected: whether something else, such as the event log, says that a checkpoint was written.
        warn: is told about each one that is passed over.

    Raises:
        NoCheckpointError: there should be one, and none is valid. A silent fresh start would lose the run.
    """
    found = list_checkpoints(directory)
    for path in found:
        try:
            return verify(path)
        except (InvalidCheckpointError, OSError) as error:
            warn(f"checkpoint {path.name} is passed over: {error}")
    if found or expected or (directory / LATEST).exists():
        raise NoCheckpointError(
            f"{directory} holds no valid checkpoint although the run has saved some, and starting anew would lose "
            "what it has learned; bring one back, or submit a new run"
        )
    return None


def set_aside(path: Path) -> None:
    """Rename a checkpoint that is not valid, so that its name is free and its content can be looked at."""
    if path.exists():
        path.rename(path.with_name(f"invalid-{path.name}-{secrets.token_hex(4)}"))


def set_aside_newer(directory: Path, step: int) -> None:
    """Set aside every checkpoint beyond ``step``: newer than the newest valid one, they are not valid."""
    for path in list_checkpoints(directory):
        if (step_of(path) or 0) > step:
            set_aside(path)
