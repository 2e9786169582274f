"""Files that are written once, synced, and known by their size and sha256."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

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

    def write(self, content: Any) -> int:  # noqa: ANN401
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
