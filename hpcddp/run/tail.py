"""The last records of a file of them, without reading the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from hpcddp.run.files import read_tail

TAIL_BYTES: Final = 64 * 1024
"""How much of a file's end is read."""


def tail_records(path: Path, size: int = TAIL_BYTES) -> list[dict[str, Any]]:
    """Return the JSON documents on the last lines of a file; torn lines at both ends are passed over.

    Args:
        path: the file.
        size: how many bytes are read at most.
    """
    records = []
    for line in read_tail(path, size).splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        # The rest of a torn line may be a number.
        if isinstance(record, dict):
            records.append(record)
    return records
