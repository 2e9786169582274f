"""Read a small UTF-8 text file, or describe why it cannot be read."""

from __future__ import annotations

import re
from pathlib import Path

from hpcddp.jobfile.names import nearest
from hpcddp.jobfile.problems import Problem

LARGEST_BYTES = 1_000_000

# Characters that YAML 1.2 and TOML both forbid (YAML 1.2.2, rule c-printable).
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ufffe\uffff]")


def read_text(path: Path) -> str | Problem:
    """Return the text of a file of at most 1 MB, or the problem with it."""
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_BYTES + 1)
    except (OSError, ValueError) as error:
        return Problem(file=str(path), sentence=_unreadable(path, error))
    if len(content) > LARGEST_BYTES:
        return Problem(file=str(path), sentence="is larger than 1 MB; a job file is a short text: check the path")
    if b"\0" in content:
        return Problem(file=str(path), sentence="holds NUL bytes, so it is no text file; check the path")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        sentence = f"is not UTF-8 (byte 0x{content[error.start]:02x}); save it as UTF-8"
        return Problem(file=str(path), line=line, sentence=sentence)
    control = _CONTROL.search(text)
    if control is not None:
        line = text.count("\n", 0, control.start()) + 1
        sentence = f"holds the control character U+{ord(control[0]):04X}; remove it"
        return Problem(file=str(path), line=line, sentence=sentence)
    return text


def _unreadable(path: Path, error: OSError | ValueError) -> str:
    match error:
        case FileNotFoundError():
            near = neighbour(path)
            return f"does not exist; {f'did you mean {near}?' if near else 'check the path'}"
        case IsADirectoryError():
            return "is a directory; name a file in it"
        case PermissionError():
            return "cannot be read by you; change its permissions"
        case OSError():
            return f"cannot be read ({error.strerror}); check the path"
        case _:
            return f"is no path ({error}); check it"


def neighbour(path: Path) -> Path | None:
    """Return the file in the same directory and with the same suffix that was most likely meant, or None."""
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix == path.suffix]
    except (OSError, ValueError):
        return None
    near = nearest(path.name, names)
    return path.parent / near if near else None
