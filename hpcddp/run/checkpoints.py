"""Checkpoints on disk: directories ``step-000123`` that are whole or not there. Standard library alone.

A checkpoint is written under a temporary name in the same directory: its files, each synced, then its manifest with
their sizes and sha256, then a rename that fails if the name exists. Readers trust manifests, never ``latest`` alone.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from hpcddp.errors import HpcddpError
from hpcddp.run.files import read_json, sync_directory, write_json, write_text
from hpcddp.run.hashed_file import FileRecord, Writer, write_hashed
from hpcddp.stop.exit_codes import ExitCode

MANIFEST = "manifest.json"
LATEST = "latest"

_NAME = re.compile(r"step-(\d{6,})", re.ASCII)
_TEMPORARY = re.compile(r"\.step-\d{6,}\.(\d+)\.[0-9a-f]+", re.ASCII)
_BLOCK = 1 << 20


class NoCheckpointError(HpcddpError):
    """There should be a checkpoint to go on from, and none is valid."""

    kind = "no_checkpoint"
    exit_code: ClassVar[int] = ExitCode.NO_CHECKPOINT


class FencedError(HpcddpError):
    """Another attempt owns the run; this one must not write."""

    kind = "fenced"
    exit_code: ClassVar[int] = ExitCode.FENCED


class InvalidCheckpointError(HpcddpError):
    """A checkpoint is torn or rotten, or no checkpoint at all."""

    kind = "invalid_checkpoint"
    exit_code: ClassVar[int] = ExitCode.INFRASTRUCTURE


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


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that has been verified.

    Args:
        path: its directory.
        manifest: its manifest.
    """

    path: Path
    manifest: Manifest


def checkpoint_name(step: int) -> str:
    """Return the name of the checkpoint after ``step`` optimizer steps."""
    return f"step-{step:06d}"


def step_of(path: Path) -> int | None:
    """Return the step that a directory's name says, or None if it is no checkpoint's name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def publish(
    directory: Path, manifest: Manifest, writers: Mapping[str, Writer], *, may_publish: Callable[[], None]
) -> Checkpoint:
    """Write a checkpoint so that it is there as a whole or not at all.

    Args:
        directory: the folder of checkpoints; made if missing.
        manifest: what it holds; its ``files`` are filled in here.
        writers: one function per file name.
        may_publish: called just before the name appears; raises if another attempt owns the run.

    Returns:
        The checkpoint. If a valid one of the same step is there already, that one.

    Raises:
        OSError: the disk is full, read-only or gone; no trace is left where that can be had.
        FencedError: from ``may_publish``.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    name = checkpoint_name(manifest.step)
    temporary = directory / f".{name}.{manifest.attempt}.{secrets.token_hex(4)}"
    target = directory / name
    try:
        temporary.mkdir(mode=0o700)
        files = {file: write_hashed(temporary / file, writer) for file, writer in writers.items()}
        complete = Manifest.from_document({**asdict(manifest), "files": {k: asdict(v) for k, v in files.items()}})
        write_json(temporary / MANIFEST, asdict(complete))
        may_publish()
        if target.exists() and (present := _valid_or_none(target)) is not None:
            return present
        set_aside(target)
        # rename(2) replaces no directory that holds something.
        temporary.rename(target)
        sync_directory(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _advance_latest(directory, manifest.step)
    return Checkpoint(target, complete)


def _advance_latest(directory: Path, step: int) -> None:
    """Let ``latest`` name this checkpoint, unless it names a later one already."""
    path = directory / LATEST
    named = step_of(Path(path.read_text(encoding="utf-8", errors="replace").strip())) if path.is_file() else None
    if named is None or named < step:
        write_text(path, f"{checkpoint_name(step)}\n")


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


def _valid_or_none(path: Path) -> Checkpoint | None:
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


def prune(directory: Path, *, keep: int, newest: Path, attempt: int) -> None:
    """Remove old checkpoints and what earlier attempts left half written.

    Args:
        directory: the folder of checkpoints.
        keep: how many stay, >= 2.
        newest: the newest valid one; it stays in any case.
        attempt: the attempt that owns the run.

    Raises:
        OSError: the disk cannot be written.
    """
    for path in list_checkpoints(directory)[keep:]:
        if path != newest:
            _remove(path)
    for path in directory.iterdir():
        left_by = _TEMPORARY.fullmatch(path.name)
        if left_by and int(left_by[1]) < attempt:
            shutil.rmtree(path, ignore_errors=True)


def _remove(path: Path) -> None:
    """Remove a checkpoint; while that takes its time nobody takes it for one."""
    doomed = path.with_name(f".{path.name}.0.{secrets.token_hex(4)}")
    path.rename(doomed)
    shutil.rmtree(doomed)
