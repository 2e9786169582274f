"""The end of a file that grows, without reading the rest."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

TAIL_BYTES: Final = 64 * 1024
"""How much of a file's end is read."""


def tail_text(path: Path, size: int = TAIL_BYTES) -> str:
    """Return the end of a file, or nothing if it cannot be read: it only adds to what is known.

    Args:
        path: the file.
        size: how many bytes at most. The first character may be torn.
    """
    try:
        with path.open("rb") as stream:
            end = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, end - size))
            return stream.read(size).decode("utf-8", errors="replace")
    except OSError:
        return ""


def tail_records(path: Path, size: int = TAIL_BYTES) -> list[dict[str, Any]]:
    """Return the JSON documents on the last lines of a file; torn lines at both ends are passed over.

    Args:
        path: the file.
        size: how many bytes are read at most.
    """
    records = []
    for line in tail_text(path, size).splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        # The rest of a torn line may be a number.
        if isinstance(record, dict):
            records.append(record)
    return records
