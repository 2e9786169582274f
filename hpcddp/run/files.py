"""Files that several processes use: records are written whole, then renamed; logs are written and read by lines.

On a full disk the few records that decide how a run goes on are written into reserve files: an attempt makes them when
it begins, and a writer takes one by a rename, overwrites it, and gives it the name of its record. No new block and no
new inode is needed, and a reader still sees the old content or the new one. A file system that never overwrites a block
in place (ZFS, Btrfs) may refuse that too.
"""

from __future__ import annotations

import errno
import fcntl
import grp
import io
import json
import os
import pwd
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, Final

from hpcddp.errors import write_message

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_RESERVE_BYTES: Final = 16 * 1024
_PROBE_BYTES: Final = 128 * 1024


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` in one step, so that a reader sees the old content or the new one.

    Args:
        path: the file; its directory exists. A symbolic link is replaced, not followed.
        text: the whole content, written as UTF-8 without newline translation.
    """
    write_bytes(path, text.encode())


def write_through_link(path: Path, text: str) -> None:
    """Replace the file that ``path`` names by ``text``, as ``write_text`` does, and leave a symbolic link as it is.

    For files of the user, who may keep them elsewhere.
    """
    write_text(Path(os.path.realpath(path)), text)


def write_bytes(path: Path, content: bytes, *, reserves: Iterable[Path] = ()) -> None:
    """Replace ``path`` by ``content`` in one step, as ``write_text`` does.

    Args:
        reserves: reserve files on the same file system; one of them is used up if the disk is full.
    """
    temporary = _temporary_name(path)
    try:
        try:
            with _open_new(temporary) as stream:
                _write_synced(stream, content)
        except OSError as error:
            if not is_full(error) or not _take_reserve(reserves, temporary):
                raise
            with temporary.open("r+b") as stream:
                _write_synced(stream, content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def _temporary_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")


def _write_synced(stream: IO[bytes], content: bytes) -> None:
    stream.write(content)
    stream.truncate()
    stream.flush()
    os.fsync(stream.fileno())


def _take_reserve(reserves: Iterable[Path], temporary: Path) -> bool:
    """Rename the first reserve file that is left to ``temporary``; return whether there was one."""
    for reserve in reserves:
        # Another process may be faster.
        with suppress(FileNotFoundError):
            reserve.rename(temporary)
            return True
    return False


def make_reserves(reserves: Iterable[Path]) -> None:
    """Make the reserve files that are missing, and their folder.

    Raises:
        OSError: the disk is full, read-only or gone.
    """
    for reserve in reserves:
        reserve.parent.mkdir(mode=0o700, exist_ok=True)
        if not reserve.exists():
            # A file system that compresses needs no less space for this.
            write_bytes(reserve, os.urandom(_RESERVE_BYTES))


def is_full(error: OSError) -> bool:
    """Return whether a file system has no block or no inode left, or the user's quota is used up."""
    return error.errno in _FULL


@contextmanager
def write_errors_printed(path: Path) -> Iterator[None]:
    """Print that a file could not be written, and continue: a full disk prevents no requeue, and no cancellation."""
    try:
        yield
    except OSError as error:
        write_message(f"{path} cannot be written ({error.strerror})")


def full_disk(directory: Path) -> str | None:
    """Return a sentence if the disk of a directory has no space for another small file, else None."""
    probe = _temporary_name(directory / "probe")
    try:
        with _open_new(probe) as stream:
            _write_synced(stream, bytes(_PROBE_BYTES))
    except OSError as error:
        return full_disk_sentence(directory, error) if is_full(error) else None
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
    return None


def is_disk_full(directory: Path) -> bool:
    """Return whether the file system of a directory has no block or no inode left; False if that is unknown."""
    try:
        disk = os.statvfs(directory)
    except OSError:
        return False
    # A file system that makes inodes as it needs them has none at all.
    return disk.f_bavail == 0 or (disk.f_files > 0 and disk.f_favail == 0)


def full_disk_sentence(path: Path, error: OSError) -> str:
    """Return a sentence about the disk of ``path``, without a full stop."""
    return f"the disk of {path} is full ({error.strerror})"


class _LossyFile(io.FileIO):
    """A file that discards what cannot be written to it."""

    def write(self, content: ReadableBuffer, /) -> int:
        try:
            return super().write(content) or 0
        except OSError:
            return memoryview(content).nbytes


def ignore_output_errors() -> None:
    """Discard what this process prints where its log cannot be written, such as on a full disk.

    Otherwise a line in the log would end a process whose work does not need the log.
    """
    for name in ("stdout", "stderr"):
        standard = getattr(sys, name)
        standard.flush()
        stream = _LossyFile(standard.fileno(), "wb", closefd=False)
        setattr(sys, name, io.TextIOWrapper(stream, standard.encoding, standard.errors, write_through=True))


def _open_new(path: Path) -> BinaryIO:
    """Open a new file that only its owner may read, whatever the umask is."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    return os.fdopen(descriptor, "wb")


def write_json(path: Path, document: object, *, reserves: Iterable[Path] = ()) -> None:
    """Replace ``path`` by ``document`` as indented JSON, in one step; ``reserves`` as for ``write_bytes``."""
    write_bytes(path, _as_json(document), reserves=reserves)


def create_json(path: Path, document: object, *, reserves: Iterable[Path] = ()) -> bool:
    """Write ``document`` to ``path`` unless the file exists: the first writer wins, whole or not at all.

    Returns:
        Whether this call created the file.
    """
    return create_bytes(path, _as_json(document), reserves=reserves)


def _as_json(document: object) -> bytes:
    # Of a name that is not UTF-8, "\\udcff" stands in the file: as an escape of Python it is one of JSON too.
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode(errors="backslashreplace")


def create_bytes(path: Path, content: bytes, *, reserves: Iterable[Path] = ()) -> bool:
    """Write ``content`` to ``path`` unless the file exists: the first writer wins, whole or not at all.

    Returns:
        Whether this call created the file.
    """
    temporary = _temporary_name(path)
    try:
        write_bytes(temporary, content, reserves=reserves)
        # A hard link fails if the name exists, which rename does not.
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as error:
        # Some file systems (tmpfs) count a link as an inode.
        if not is_full(error) or not temporary.exists() or path.exists():
            raise
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    return True


def read_json(path: Path) -> Any:  # noqa: ANN401  any document
    """Return the document in ``path``, or None if there is no such file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


@contextmanager
def open_regular(path: Path, *, follow_links: bool = False) -> Iterator[tuple[IO[bytes], int]]:
    """Open a regular file and yield it with its size in bytes; no pipe is waited for.

    Args:
        follow_links: whether it may be a symbolic link, as the batch log of an element of a sweep is.

    Raises:
        NotRegularError: it is a pipe, a device or a socket.
        PermissionError: it belongs neither to a trusted user nor to the owner of its directory, or cannot be read.
        OSError: it is missing, is a directory, cannot be read, or (with ``ELOOP``) is a symbolic link.
    """
    more = os.O_NONBLOCK if follow_links else os.O_NONBLOCK | os.O_NOFOLLOW
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | more)) as stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise NotRegularError(errno.EINVAL, "it is not a regular file", str(path))
        if status.st_uid not in trusted_users():
            directory = (path.resolve() if follow_links else path).parent
            if status.st_uid != directory.stat().st_uid:
                sentence = f"it belongs to user {status.st_uid}, not to the owner of its directory"
                raise PermissionError(errno.EPERM, sentence, str(path))
        yield stream, status.st_size


def trusted_users() -> set[int]:
    """Return whose files can be trusted: this user's, and root's, whose user id may be another in a container."""
    return {0, os.getuid(), Path("/").stat().st_uid}


def user_name() -> str:
    """Return the name of this process's user; its number if it has no name, as in some containers."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def user_and_groups() -> tuple[str, list[str]]:
    """Return the names of this process's user and groups, or their numbers where they have no names."""
    return user_name(), [_group_name(number) for number in {os.getegid(), *os.getgroups()}]


def _group_name(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


class NotRegularError(OSError):
    """There is something other than a regular file in its place."""


def why_unreadable(error: OSError) -> str:
    """Return why ``open_regular`` could not open a file, or why it could not be read, in a few words."""
    # open(2), O_NOFOLLOW.
    if error.errno == errno.ELOOP:
        return "it is a symbolic link"
    return error.strerror or type(error).__name__


def unreadable_sentence(path: Path, error: OSError) -> str:
    """Return why a log cannot be read, and what to do about it."""
    way_out = "make it readable"
    if error.errno == errno.ELOOP or isinstance(error, IsADirectoryError | NotRegularError):
        way_out = "put a regular file in its place, or move it away"
    return f"{path} cannot be read ({why_unreadable(error)}); {way_out}"


def exists(path: Path) -> bool:
    """Return whether a path exists; False also if it cannot be looked at, as on a file system that does not answer."""
    try:
        return path.exists()
    except OSError:
        return False


def is_empty(path: Path) -> bool:
    """Return whether a path is a regular file that can be seen and has no content."""
    try:
        return path.is_file() and path.stat().st_size == 0
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


def begin_of_last_lines(path: Path, count: int, *, begin: int = 0, end: int | None = None) -> int:
    """Return the offset at which the last lines of a file begin; the file is read backwards from there.

    Args:
        path: a regular file.
        count: how many lines; a last one without its end is one too.
        begin: the least offset.
        end: the offset behind the last byte that counts; None = the end of the file.

    Raises:
        OSError: the file cannot be read.
    """
    with open_regular(path, follow_links=True) as (stream, size):
        stop = size if end is None else min(end, size)
        if count == 0:
            return stop
        missing = count
        # The line break that ends the last line begins no line.
        position = max(begin, stop - 1)
        while position > begin:
            block_begin = max(begin, position - _BLOCK_BYTES)
            stream.seek(block_begin)
            block = stream.read(position - block_begin)
            line_break = block.rfind(b"\n")
            while line_break >= 0:
                missing -= 1
                if missing == 0:
                    return block_begin + line_break + 1
                line_break = block.rfind(b"\n", 0, line_break)
            position = block_begin
        return begin


LONGEST_LINE: Final = 64 * 1024
"""Bytes; a longer line is read in parts, so that no log takes more memory."""
_BLOCK_BYTES: Final = 256 * 1024
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
    rest = b""
    offset = begin
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
    descriptor = open_lines(path)
    try:
        write_lines(descriptor, [line])
    finally:
        os.close(descriptor)


def open_lines(path: Path) -> int:
    """Open a file to append lines, end a line that is cut off, and return the descriptor.

    Args:
        path: the file, created with mode 0600 if missing.

    Raises:
        OSError: the file is a symbolic link or no regular file, or the disk is full, read-only or gone.
    """
    descriptor = open_to_append(path, os.O_RDWR)
    try:
        _end_torn_line(path, descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def write_lines(descriptor: int, lines: Sequence[str]) -> None:
    """Append lines in one write.

    Only a failure asks for the size of the file: over NFS, each such question would wait for the server to take what
    was written before.

    Args:
        descriptor: the file, as ``open_lines`` returns it.
        lines: the texts without their newlines.

    Raises:
        OSError: the disk is full, read-only or gone; what was written of the lines is taken back.
    """
    # Lines with names that are not UTF-8 are JSON: as in ``_as_json``.
    content = "".join(f"{line}\n" for line in lines).encode(errors="backslashreplace")
    done = 0
    try:
        # A full disk takes a part first, and fails at the rest.
        while done < len(content):
            done += os.write(descriptor, content[done:])
    except OSError:
        # An incomplete line would become one with the next. If another process has written meanwhile, it stays.
        end = os.lseek(descriptor, 0, os.SEEK_CUR)
        if done and os.fstat(descriptor).st_size == end:
            os.ftruncate(descriptor, end - done)
        raise


def open_to_append(path: Path, mode: int = os.O_WRONLY) -> int:
    """Open a file, created with mode 0600 if missing, and return its descriptor; a symbolic link is not followed.

    Raises:
        OSError: the file is a symbolic link, or cannot be opened.
    """
    # O_NONBLOCK: a pipe in the place of the file is an error, and is not waited for.
    flags = mode | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    return os.open(path, flags, 0o600)


def _end_torn_line(path: Path, descriptor: int) -> None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise NotRegularError(errno.EINVAL, "it is not a regular file", str(path))
    if status.st_size and os.pread(descriptor, 1, status.st_size - 1) != b"\n":
        os.write(descriptor, b"\n")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep out the processes of this user, also on other hosts, that lock the same file; wait until they are done.

    Nothing is kept out where the file cannot be opened, or its file system has no locks.

    Args:
        path: a file that is never replaced, created if missing.
    """
    try:
        # Over NFS an exclusive lock needs a descriptor that may write.
        descriptor = open_to_append(path)
    except OSError:
        yield
        return
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


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
        replacements: how often the file was replaced.
    """

    def __init__(self, path: Path, *, begin: int = 0) -> None:
        self._path = path
        self._begin = begin
        self.offset = begin
        self._inode: int | None = None
        self.replacements = 0

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
            self.replacements += 1
        self._inode = inode
        for line, behind in lines_from(self._path, self.offset, with_last=ended):
            self.offset = behind
            yield line
