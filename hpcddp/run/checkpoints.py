"""Checkpoints on disk: their manifests, names and verification, and the newest valid one.

A manifest is JSON whose second line is the sha256 of all lines after it: ``tail -n +3 manifest.json | sha256sum``.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, ClassVar, Final, cast

from hpcddp.errors import HpcddpError
from hpcddp.run.files import NotRegularError, open_regular, why_unreadable
from hpcddp.run.record import LARGEST_RECORD, LATEST_TIME, Record
from hpcddp.stop.reasons import ExitCode

MANIFEST: Final = "manifest.json"
LATEST: Final = "latest"
BEST: Final = "best"
"""A symbolic link to the checkpoint of the best evaluation."""
_CHECKSUM: Final = "sha256"
_HEAD = re.compile(rf'\{{\n  "{_CHECKSUM}": "([0-9a-f]{{64}})",\n')
# A file of the checkpoint's own directory, and no longer than a file system takes.
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}", re.ASCII)
# Not more digits than a 64-bit number holds.
_NAME = re.compile(r"step-(\d{6,18})", re.ASCII)
_TEMPORARY = re.compile(r"\.step-\d{6,}\.(\d+)\.[0-9a-f]+", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(Record):
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

    IS_VERSIONED: ClassVar[bool] = False

    step: int
    attempt: int
    time: float
    contract: Mapping[str, Any]
    progress: Mapping[str, Any]
    information: Mapping[str, Any]
    files: Mapping[str, FileRecord]

    def to_text(self) -> str:
        """Return it as JSON, with its checksum.

        Raises:
            ValueError: it is too large to be read again.
        """
        lines = json.dumps(asdict(self), indent=2, ensure_ascii=False).removeprefix("{\n") + "\n"
        content = lines.encode()
        if len(content) > LARGEST_RECORD:
            raise ValueError(
                f"the manifest of a checkpoint would have {len(content)} bytes, and the largest that is read has "
                f"{LARGEST_RECORD}; put what is large into the objects that are saved"
            )
        return f'{{\n  "{_CHECKSUM}": "{hashlib.sha256(content).hexdigest()}",\n{lines}'

    @classmethod
    def from_text(cls, text: str) -> Manifest:
        """Return the manifest that ``to_text`` wrote.

        Raises:
            ValueError: says what is wrong with it.
        """
        head = _HEAD.match(text)
        if head is None:
            raise ValueError("its second line is not the checksum of the lines after it")
        if hashlib.sha256(text[head.end() :].encode()).hexdigest() != head[1]:
            raise ValueError("its content does not have its checksum")
        try:
            document = json.loads(text, object_pairs_hook=_without_duplicates)
        except RecursionError as error:
            raise ValueError("its content is nested too deeply") from error
        manifest = cls.from_document(document)
        if not 0 <= manifest.time < LATEST_TIME:
            raise ValueError("its time is out of range")
        for name in manifest.files:
            if not _FILE.fullmatch(name):
                raise ValueError(f"{name!r:.80} is not the name of a file of a checkpoint")
        return manifest


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        raise ValueError("it has the same key twice")
    return document


def checkpoint_name(step: int) -> str:
    """Return the name of the checkpoint after ``step`` optimizer steps."""
    return f"step-{step:06d}"


def step_of(path: Path) -> int | None:
    """Return the step that a directory's name says, or None if it is no checkpoint's name."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        return None
    step = int(match[1])
    # Two names of one step would be two checkpoints of it.
    return step if path.name == checkpoint_name(step) else None


def temporary_name(step: int, attempt: int) -> str:
    """Return a new name for a checkpoint that is being written or removed by an attempt."""
    return f".{checkpoint_name(step)}.{attempt}.{secrets.token_hex(4)}"


def left_by(path: Path) -> int | None:
    """Return the attempt that a temporary name belongs to, or None if it is no such name."""
    match = _TEMPORARY.fullmatch(path.name)
    return int(match[1]) if match else None


Writer = Callable[[IO[bytes]], None]
"""Writes the content of one file to a binary stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """What a file of a checkpoint must be.

    Args:
        size: bytes.
        sha256: hex digest.
    """

    size: int
    sha256: str


def write_hashed(path: Path, writer: Writer) -> FileRecord:
    """Write a new file, sync it, and return its size and sha256.

    Args:
        path: the file; must not exist.
        writer: writes the content to the stream that it is given.

    Raises:
        OSError: the disk is full, read-only or gone, even where the writer makes another error of that.
    """
    with _HashingFile(path) as stream:
        try:
            writer(cast("IO[bytes]", stream))
        except Exception:
            if stream.failure is not None:
                raise stream.failure from None
            raise
        return stream.sync()


class _HashingFile(io.RawIOBase):
    """A file that learns its own size and sha256 while it is written."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._digest = hashlib.sha256()
        self._size = 0
        self.failure: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:  # noqa: ANN401  whatever has a buffer
        view = memoryview(content).cast("B")
        try:
            done = 0
            while done < len(view):
                done += os.write(self._descriptor, view[done:])
        except OSError as error:
            # Whoever writes may turn this into an error of its own; the cause must not be lost.
            self.failure = error
            raise
        self._digest.update(view)
        self._size += len(view)
        return len(view)

    def sync(self) -> FileRecord:
        os.fsync(self._descriptor)
        return FileRecord(size=self._size, sha256=self._digest.hexdigest())

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()


_BLOCK = 1 << 20


class NoCheckpointError(HpcddpError):
    """The run has to resume from a checkpoint, and none is valid."""

    kind = "no_checkpoint"
    exit_code: ClassVar[int] = ExitCode.NO_CHECKPOINT


class InvalidCheckpointError(HpcddpError):
    """A checkpoint is incomplete or corrupted, cannot be read, or is no checkpoint at all."""

    kind = "invalid_checkpoint"
    exit_code: ClassVar[int] = ExitCode.INFRASTRUCTURE


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that has been verified."""

    path: Path
    manifest: Manifest


def verify(path: Path, *, sizes_only: bool = False) -> Checkpoint:
    """Return a checkpoint whose files are what its manifest says. Other files in its directory are not looked at.

    Args:
        path: its directory, or ``checkpoints/best``.
        sizes_only: whether to compare only the sizes of the files, without reading them.

    Raises:
        InvalidCheckpointError: names what is wrong, also where the disk cannot be read.
    """
    manifest = read_manifest(path)
    for name, record in manifest.files.items():
        _verify_file(path / name, record, sizes_only=sizes_only)
    return Checkpoint(path, manifest)


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of a checkpoint; the other files are not read.

    Raises:
        InvalidCheckpointError: it is missing, damaged, or of another step.
    """
    with open_file(path / MANIFEST) as (stream, size):
        if size > LARGEST_RECORD:
            raise InvalidCheckpointError(f"{path / MANIFEST} is damaged (it has {size} bytes)")
        content = stream.read()
    try:
        manifest = Manifest.from_text(content.decode())
    except ValueError as error:
        raise InvalidCheckpointError(f"{path / MANIFEST} is damaged ({error})") from error
    named_path = path
    if path.name == BEST:
        named_path = best_checkpoint(path.parent) or path
    if manifest.step != step_of(named_path):
        raise InvalidCheckpointError(f"{path / MANIFEST} is of step {manifest.step}, not of its directory's")
    return manifest


def _verify_file(path: Path, record: FileRecord, *, sizes_only: bool) -> None:
    digest = hashlib.sha256()
    with open_file(path) as (stream, size):
        if size != record.size:
            raise InvalidCheckpointError(f"{path} has {size} bytes, not the {record.size} of its manifest")
        if sizes_only:
            return
        while block := stream.read(_BLOCK):
            digest.update(block)
    if digest.hexdigest() != record.sha256:
        raise InvalidCheckpointError(f"{path} has another sha256 than its manifest says")


@contextmanager
def open_file(path: Path) -> Iterator[tuple[IO[bytes], int]]:
    """Open a regular file of a checkpoint and yield it with its size; no link is followed, no pipe is waited for.

    Raises:
        InvalidCheckpointError: it is missing, is something else, or the disk cannot be read, also within the block.
    """
    try:
        with open_regular(path) as (stream, size):
            yield stream, size
    except FileNotFoundError as error:
        raise InvalidCheckpointError(f"{path} is missing") from error
    except NotRegularError as error:
        raise InvalidCheckpointError(f"{path} is not a regular file") from error
    except OSError as error:
        raise InvalidCheckpointError(f"{path} cannot be read ({why_unreadable(error)})") from error


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


def best_checkpoint(directory: Path) -> Path | None:
    """Return the checkpoint that ``best`` names, or None if it names none that is there; nothing is verified."""
    try:
        named = directory / (directory / BEST).readlink()
    except OSError:
        return None
    # A link to another place is not followed.
    if named.parent == directory and step_of(named) is not None and named.is_dir():
        return named
    return None


def newest_valid(
    directory: Path,
    *,
    expected: bool,
    warn: Callable[[str], None],
    check: Callable[[Checkpoint], object] = lambda _: None,
) -> Checkpoint | None:
    """Return the newest valid checkpoint, or None if there never was one.

    Args:
        directory: the folder of checkpoints; need not exist.
        expected: whether something else, such as the event log, says that a checkpoint was written.
        warn: called with a sentence for each one that is skipped.
        check: checks one that is complete; raises InvalidCheckpointError if its manifest is not usable.

    Raises:
        NoCheckpointError: there should be one, and none is valid. A silent fresh start would lose the run.
    """
    checkpoints = list_checkpoints(directory)
    for path in checkpoints:
        try:
            checkpoint = verify(path)
            check(checkpoint)
        except InvalidCheckpointError as error:
            warn(f"checkpoint {path.name} is skipped: {error}")
        else:
            return checkpoint
    if checkpoints or expected or (directory / LATEST).exists():
        raise NoCheckpointError(
            f"{directory} holds no valid checkpoint although the run has saved some, and a start from the beginning "
            "would lose all progress; restore a copy, or submit a new run"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState:
    """One checkpoint on disk.

    Args:
        step: optimizer steps done, as its name says.
        size: bytes of its files.
        time: when it was written, in seconds since the epoch.
        attempt: the attempt that wrote it; None where its manifest cannot be read.
        damage: why it is not valid; None = it is.
        resumes: whether a resume would take it: the newest valid one.
        is_best: whether ``best`` names it.
    """

    path: Path
    step: int
    size: int
    time: float
    attempt: int | None
    damage: str | None
    resumes: bool = False
    is_best: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return the document that ``--json`` prints."""
        return {
            "step": self.step,
            "size": self.size,
            "time": self.time,
            "attempt": self.attempt,
            "valid": self.damage is None,
            "damage": self.damage,
            "resumes": self.resumes,
            "best": self.is_best,
            "path": str(self.path),
        }


def survey(directory: Path) -> list[CheckpointState]:
    """Return what is known of every checkpoint in a folder, the newest first; reads all of their files.

    Args:
        directory: the folder of checkpoints; need not exist.
    """
    states = []
    for path in list_checkpoints(directory):
        # A run that is training removes old ones meanwhile.
        with suppress(FileNotFoundError):
            states.append(_look(path))
    newest = next((state for state in states if state.damage is None), None)
    best = best_checkpoint(directory)
    return [replace(state, resumes=state is newest, is_best=state.path == best) for state in states]


def _look(path: Path) -> CheckpointState:
    attempt = None
    written = None
    damage = None
    try:
        manifest = verify(path).manifest
        attempt = manifest.attempt
        written = manifest.time
    except InvalidCheckpointError as error:
        damage = str(error)
    sizes, times = zip(*_files(path), strict=True)
    return CheckpointState(
        path=path,
        step=step_of(path) or 0,
        size=sum(sizes),
        time=max(times) if written is None else written,
        attempt=attempt,
        damage=damage,
    )


def _files(path: Path) -> Iterator[tuple[int, float]]:
    """Yield the sizes and times of a checkpoint's files; the directory counts as empty."""
    yield 0, path.lstat().st_mtime
    # One that is closed to this user is not valid, and listed as such.
    with suppress(PermissionError):
        for file in path.iterdir() if path.is_dir() else ():
            status = file.lstat()
            yield status.st_size, status.st_mtime
