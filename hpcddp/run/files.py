"""Files that another process reads: written whole, then renamed."""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, Final


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` in one step, so that a reader sees the old content or the new one.

    Args:
        path: the file; its directory exists. A symbolic link is replaced, not followed.
        text: the whole content, written as UTF-8 without newline translation.
    """
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Replace ``path`` by ``content`` in one step, as ``write_text`` does."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with _open_new(temporary) as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def _open_new(path: Path) -> BinaryIO:
    """Open a new file that only its owner may read, whatever the umask is."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    return os.fdopen(descriptor, "wb")


def write_json(path: Path, document: Any) -> None:  # noqa: ANN401
    """Replace ``path`` by ``document`` as indented JSON, in one step."""
    write_bytes(path, _as_json(document))


def create_json(path: Path, document: Any) -> bool:  # noqa: ANN401
    """Write ``document`` to ``path`` unless the file exists: the first writer wins, whole or not at all.

    Returns:
        Whether this call created the file.
    """
    return _create(path, _as_json(document))


def _as_json(document: Any) -> bytes:  # noqa: ANN401
    # Of a name that is not UTF-8, "\\udcff" stands in the file: as an escape of Python it is one of JSON too.
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode(errors="backslashreplace")


def create_text(path: Path, text: str) -> bool:
    """Write ``text`` to ``path`` unless the file exists: the first writer wins, whole or not at all.

    Returns:
        Whether this call created the file.
    """
    return _create(path, text.encode())


def _create(path: Path, content: bytes) -> bool:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        write_bytes(temporary, content)
        # A hard link fails if the name exists, which rename does not.
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    return True


def read_json(path: Path) -> Any:  # noqa: ANN401
    """Return the document in ``path``, or None if there is no such file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


@contextmanager
def open_regular(path: Path, *, follow_links: bool = False) -> Iterator[tuple[IO[bytes], int]]:
    """Open a regular file and yield it with its size in bytes; no pipe is waited for.

    Args:
        path: the file.
        follow_links: whether it may be a symbolic link, as the batch log of an element of a sweep is.

    Raises:
        NotRegularError: it is a pipe, a device or a socket.
        OSError: it is missing, is a directory, cannot be read, or (with ``ELOOP``) is a symbolic link.
    """
    with open(path, "rb", opener=_open_target_at_once if follow_links else _open_at_once) as stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise NotRegularError(errno.EINVAL, "it is not a regular file", str(path))
        yield stream, status.st_size


class NotRegularError(OSError):
    """There is something other than a regular file in its place."""


def why_unreadable(error: OSError) -> str:
    """Return why ``open_regular`` could not open a file, or why it could not be read, in a few words."""
    # open(2), O_NOFOLLOW.
    return "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror or type(error).__name__


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _open_target_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def exists(path: Path) -> bool:
    """Return whether there is something at a path; what must not be looked at, or has too long a name, is not there."""
    try:
        return path.exists()
    except OSError:
        return False


def read_tail(path: Path, size: int) -> str:
    """Return the last ``size`` bytes of a file as text; empty if it cannot be read, torn characters replaced."""
    try:
        with open_regular(path, follow_links=True) as (stream, length):
            stream.seek(max(0, length - size))
            return stream.read(size).decode("utf-8", errors="replace")
    except OSError:
        return ""


LONGEST_LINE: Final = 64 * 1024
"""Bytes; a longer line is read in parts, so that no log takes more memory."""
_PART_BYTES: Final = 16 * 1024


def lines_from(path: Path, begin: int, *, end: int = sys.maxsize, with_last: bool) -> Iterator[tuple[bytes, int]]:
    """Yield the lines of a file, each with the offset behind it.

    The file is open only while a part of it is read, so that thousands can be read at once.

    Args:
        path: the file; nothing is yielded if it is missing, or is no regular file.
        begin: the offset of the first line.
        end: the offset behind the last byte that is read.
        with_last: whether a last line without its end is a line too.

    Raises:
        OSError: it cannot be read.
    """
    rest, offset = b"", begin
    while offset < end:
        skipped, part = _read_part(path, offset, min(_PART_BYTES, end - offset))
        if not part:
            break
        offset += skipped
        *lines, rest = (rest + part).split(b"\n")
        behind = offset + len(part) - len(rest)
        at = behind - sum(len(line) + 1 for line in lines)
        for line in lines:
            at += len(line) + 1
            yield line + b"\n", at
        offset = behind + len(rest)
        if len(rest) >= LONGEST_LINE:
            yield rest, offset
            rest = b""
    if rest and with_last:
        yield rest, offset


def _read_part(path: Path, offset: int, size: int) -> tuple[int, bytes]:
    """Return how many bytes of a hole follow an offset, and what is behind them; nothing where no data follow."""
    try:
        with open_regular(path, follow_links=True) as (stream, _):
            begin = os.lseek(stream.fileno(), offset, os.SEEK_DATA)
            return begin - offset, os.pread(stream.fileno(), size, begin)
    except (FileNotFoundError, NotRegularError):
        return 0, b""
    except OSError as error:
        # lseek(2): no data behind the offset.
        if error.errno == errno.ENXIO:
            return 0, b""
        raise


def append_line(path: Path, line: str) -> None:
    """Append one line in one write, so that lines of several processes do not mix.

    A line that a process or a power failure cut off stays alone: the new one begins after it. A line that is still
    being written looks cut off too, and is followed by an empty line, which every reader leaves out.

    Args:
        path: the file, created with mode 0600 if missing.
        line: the text without its newline.

    Raises:
        OSError: the file is a symbolic link or no regular file, or the disk is full, read-only or gone; what was
            written of the line is taken back.
    """
    # Lines with names that are not UTF-8 are JSON: as in ``_as_json``.
    content = f"{line}\n".encode(errors="backslashreplace")
    descriptor = _open_to_append(path, os.O_RDWR)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise NotRegularError(errno.EINVAL, "it is not a regular file", str(path))
        _write_whole(descriptor, content if _ends_with_newline(descriptor) else b"\n" + content)
    finally:
        os.close(descriptor)


def open_to_append(path: Path) -> int:
    """Open a file, created with mode 0600 if missing, and return its descriptor; a symbolic link is not followed.

    Raises:
        OSError: the file is a symbolic link, or cannot be opened.
    """
    return _open_to_append(path, os.O_WRONLY)


def _open_to_append(path: Path, mode: int) -> int:
    return os.open(path, mode | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _ends_with_newline(descriptor: int) -> bool:
    """Return whether the next line begins at the start of a line; also true of what has no content to look at."""
    size = os.fstat(descriptor).st_size
    return size == 0 or os.pread(descriptor, 1, size - 1) == b"\n"


def _write_whole(descriptor: int, content: bytes) -> None:
    before, done = os.fstat(descriptor).st_size, 0
    try:
        # A full disk takes a part first, and fails at the rest.
        while done < len(content):
            done += os.write(descriptor, content[done:])
    except OSError:
        # A torn line would swallow the next one. If somebody else has written meanwhile, it stays.
        if os.fstat(descriptor).st_size == before + done:
            os.ftruncate(descriptor, before)
        raise


def sync_directory(path: Path) -> None:
    """Make renames in ``path`` survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


TAIL_BYTES: Final = 64 * 1024
"""How much of a file's end is read."""


class GrowingFile:
    """Reads what another process appends to a file, line by line, also when the file is replaced by another one.

    Args:
        path: the file; it need not exist yet.
        begin: the offset of the first line to read.

    Attributes:
        offset: the offset behind the last line that was read.
    """

    def __init__(self, path: Path, *, begin: int = 0) -> None:
        self._path, self._begin, self.offset = path, begin, begin
        self._inode: int | None = None

    def new_lines(self, *, ended: bool = False) -> Iterator[bytes]:
        """Yield the complete lines that were appended since the last call, each with its end.

        Args:
            ended: whether nothing more is appended; then a last line without its end is a line too.

        Raises:
            OSError: it cannot be read.
        """
        try:
            inode = self._path.stat().st_ino
        except FileNotFoundError:
            return
        if self._inode not in (None, inode):
            self.offset = self._begin
        self._inode = inode
        for line, behind in lines_from(self._path, self.offset, with_last=ended):
            self.offset = behind
            yield line
