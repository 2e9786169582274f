"""When the lines of a log were written: ``rank-N.times`` beside ``rank-N.log``.

A program's output has no times, and a pipe that adds them would lose the last lines of a process that is killed. So the
task reads the size of its own log twice a second, and appends lines ``SIZE TIME``. What was written after the last of
them has the time of the file's last change.
"""

from __future__ import annotations

import bisect
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hpcddp.run.directory import times_of
from hpcddp.run.files import append_line, lines_from


class TimestampWriter:
    """Writes down how large a log was when."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._size = 0

    def look(self) -> None:
        """Look at the log; a line is written if it has grown.

        Raises:
            OSError: the disk is full or gone.
        """
        status = self._log.stat()
        if status.st_size != self._size:
            append_line(times_of(self._log), f"{status.st_size} {status.st_mtime:.3f}")
            self._size = status.st_size


@dataclass(frozen=True, slots=True)
class Times:
    """When each part of a log was written.

    Args:
        sizes: how large the log was, rising.
        times: when, in seconds since the epoch.
    """

    sizes: Sequence[int]
    times: Sequence[float]

    def at(self, offset: int) -> float:
        """Return when the byte at an offset was written, to half a second."""
        return self.times[min(bisect.bisect_right(self.sizes, offset), len(self.times) - 1)]


# Numbers of this length are valid for every log and clock.
_TIMESTAMP: Final = re.compile(r"(?P<size>[0-9]{1,18}) (?P<time>[0-9]{1,11}(\.[0-9]{1,9})?)\n")


def read_times(log: Path) -> Times:
    """Return the times of a log; without any of its own, all of it has the time of its last change.

    Args:
        log: the log; it exists.
    """
    status = log.stat()
    sizes: list[int] = []
    times: list[float] = []
    for line in _lines(times_of(log)):
        match = _TIMESTAMP.fullmatch(line)
        # What is torn or stale would not rise.
        if match is not None and (not sizes or int(match["size"]) > sizes[-1]):
            sizes.append(int(match["size"]))
            times.append(float(match["time"]))
    if not sizes or status.st_size > sizes[-1]:
        sizes.append(status.st_size)
        times.append(status.st_mtime)
    return Times(sizes, times)


def _lines(path: Path) -> Iterator[str]:
    try:
        # A line without its end may have lost a part of its time.
        for line, _ in lines_from(path, 0, with_last=False):
            yield line.decode("ascii", errors="replace")
    except OSError:
        return


_LOOK_EVERY_S: Final = 0.5


def record_timestamps(log: Path) -> threading.Thread:
    """Begin to look at a log, in a thread that ends with the process or with the disk.

    Args:
        log: the log that this process writes to.

    Returns:
        The thread.
    """
    thread = threading.Thread(target=_look, args=(TimestampWriter(log),), name="hpcddp-times", daemon=True)
    thread.start()
    return thread


def _look(writer: TimestampWriter) -> None:
    while True:
        try:
            writer.look()
        except OSError:
            # A disk that is full or gone is told of elsewhere; without times the log is still a log.
            return
        time.sleep(_LOOK_EVERY_S)
