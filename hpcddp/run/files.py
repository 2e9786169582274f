"""Files that another process reads: written whole, then renamed."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any, TextIO


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` in one step, so that a reader sees the old content or the new one.

    Args:
        path: the file; its directory exists.
        text: the whole content, written as UTF-8 without newline translation.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with _create(temporary) as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def _create(path: Path) -> TextIO:
    """Open a new file that only its owner may read, whatever the umask is."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    return os.fdopen(descriptor, "w", encoding="utf-8", newline="")


def write_json(path: Path, document: Any) -> None:  # noqa: ANN401
    """Replace ``path`` by ``document`` as indented JSON, in one step."""
    write_text(path, json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def create_json(path: Path, document: Any) -> bool:  # noqa: ANN401
    """Write ``document`` to ``path`` unless the file exists: the first writer wins, whole or not at all.

    Returns:
        Whether this call created the file.
    """
    return create_text(path, json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def create_text(path: Path, text: str) -> bool:
    """Write ``text`` to ``path`` unless the file exists: the first writer wins, whole or not at all.

    Returns:
        Whether this call created the file.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        write_text(temporary, text)
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


def read_tail(path: Path, size: int) -> str:
    """Return the last ``size`` bytes of a file as text; empty if it cannot be read, torn characters replaced."""
    try:
        with path.open("rb") as stream:
            end = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, end - size))
            return stream.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def append_line(path: Path, line: str) -> None:
    """Append one line in one write, so that lines of several processes do not mix.

    Args:
        path: the file, created with mode 0600 if missing.
        line: the text without its newline.

    Raises:
        OSError: the disk is full, read-only or gone; what was written of the line is taken back.
    """
    content = f"{line}\n".encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        _write_whole(descriptor, content)
    finally:
        os.close(descriptor)


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
