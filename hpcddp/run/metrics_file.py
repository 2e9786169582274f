"""The file of metrics as its writer sees it: ``metrics.jsonl``, a line for each record."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from hpcddp.run.files import open_lines, write_lines

METRICS_OPEN_S: Final = 2.0


class MetricsFile:
    """Appends each record to a file at once, so that a process that aborts or is killed loses none.

    The file stays open for 2 s at most: other hosts see what was written when it is closed (nfs(5), close-to-open).

    Args:
        before_open: called before the file is opened; raises if this process may no longer write.
        warn: called once when records cannot be written; they are kept, and written when the file can be.
        monotonic: seconds on a clock that never goes back.
        open_s: how long the file stays open, in seconds; 0 closes it after each record.
    """

    def __init__(
        self,
        path: Path,
        *,
        before_open: Callable[[], None],
        warn: Callable[[str], None],
        monotonic: Callable[[], float] = time.monotonic,
        open_s: float = METRICS_OPEN_S,
    ) -> None:
        self._path = path
        self._monotonic = monotonic
        self._before_open = before_open
        self._warn = warn
        self._open_s = open_s
        self._descriptor: int | None = None
        # The lines since the file was opened; a disk over the network says only at its end that it did not take them.
        self._lines: list[str] = []
        self._written = 0
        self._warned = False
        self._flushed_at = monotonic()

    def add(self, record: Mapping[str, Any]) -> None:
        """Write a record; numbers that JSON does not have become null."""
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in record.items()
        }
        self._lines.append(json.dumps(finite))
        # What a full disk did not take is written again after a while, not at each record.
        open_s = METRICS_OPEN_S if self._warned else self._open_s
        if self._monotonic() - self._flushed_at >= open_s:
            self.flush()
        elif not self._warned:
            self._write()

    def flush(self) -> None:
        """Write what could not be written before, and show it to other hosts.

        A disk that is full or missing does not delay the training.
        """
        self._write()
        self._close()
        self._flushed_at = self._monotonic()

    def _write(self) -> None:
        if self._written == len(self._lines):
            return
        try:
            if self._descriptor is None:
                self._before_open()
                self._descriptor = open_lines(self._path)
            write_lines(self._descriptor, self._lines[self._written :])
        except OSError as error:
            self._report(error)
            self._close()
        else:
            self._written = len(self._lines)
            self._warned = False

    def _close(self) -> None:
        if self._descriptor is None:
            return
        descriptor = self._descriptor
        self._descriptor = None
        try:
            os.close(descriptor)
        except OSError as error:
            self._report(error)
        else:
            del self._lines[: self._written]
        self._written = 0

    def _report(self, error: OSError) -> None:
        if not self._warned:
            self._warn(
                f"warning: {self._path} cannot be written ({error}); the training goes on, records stay in memory"
            )
        self._warned = True
