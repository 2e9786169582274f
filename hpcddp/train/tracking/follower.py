"""Follow ``metrics.jsonl`` in a thread, and pass its new records to one tracker as points of curves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, Final

from hpcddp.run.files import open_regular
from hpcddp.run.metrics import MetricsLine
from hpcddp.run.ownership import FencedError, raise_if_fenced
from hpcddp.run.record import parse_lines
from hpcddp.train.tracking.protocol import AttemptEnding, Point, Subject, Tracker

_VAL: Final = "val_"
# Entries that give the position of a point, or are constant.
_NO_CURVES: Final = frozenset({"step", "time", "val_samples", "eval_s"})


class MetricsReader:
    """Reads the lines of a metrics file as they are written.

    It keeps the opened file; a later attempt replaces the file at the path.

    Args:
        path: the file; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stream: IO[bytes] | None = None
        self._opened = ExitStack()
        self._torn = b""
        self._time = 0.0

    def read(self, most: int) -> list[Point]:
        """Return the next points, at most ``most``; an empty list if there are no new records."""
        if self._stream is None:
            try:
                self._stream, _ = self._opened.enter_context(open_regular(self._path))
            except FileNotFoundError:
                return []
        return list(self._points(self._stream, most))

    def close(self) -> None:
        """Close the file."""
        self._opened.close()

    def _points(self, stream: IO[bytes], most: int) -> Iterator[Point]:
        for _ in range(most):
            line = self._torn + stream.readline()
            if not line.endswith(b"\n"):
                self._torn = line
                return
            self._torn = b""
            # A damaged line is left out.
            for record in parse_lines(line, MetricsLine).records:
                # An evaluation has no time of its own.
                self._time = self._time if record.time is None else record.time
                evaluated = any(name.startswith(_VAL) for name in record.facts)
                values = dict(_values(record.facts, evaluated=evaluated))
                yield Point(record.step, self._time, values, evaluated)


def _values(record: Mapping[str, Any], *, evaluated: bool) -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if name in _NO_CURVES or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if name.startswith(_VAL):
            yield f"val/{name.removeprefix(_VAL)}", value
        elif not (evaluated and name == "epoch"):
            yield f"train/{name}", value


_LOOK_EVERY_S: Final = 2.0
_BLOCK: Final = 500


class Follower(threading.Thread):
    """Passes new records to one tracker until the attempt ends.

    The failure of a tracker is a warning. At the end the tracker is tried once more with the records that it misses:
    the network may work again, or a signal to the job may have ended the tracker's own process.

    Args:
        name: name of the tracker.
        subject: the run that it shows.
        connect: opens the tracker; called in this thread.
        warn: writes a warning.
    """

    def __init__(
        self, name: str, subject: Subject, *, connect: Callable[[Subject], Tracker], warn: Callable[[str], None]
    ) -> None:
        super().__init__(name=f"hpcddp-{name}", daemon=True)
        self._tracker_name, self._subject, self._connect, self._warn = name, subject, connect, warn
        self._ended = threading.Event()
        self._ending: AttemptEnding | None = None
        self._warned = ""

    def end(self, ending: AttemptEnding | None) -> None:
        """Let the follower pass the last records and, if the ending is known, close the tracker; ``join`` waits."""
        self._ending = ending
        self._ended.set()

    def run(self) -> None:
        """Follow to the end."""
        try:
            if not self._follow(is_last=False):
                self._ended.wait()
                self._follow(is_last=True)
        except FencedError:
            # Another attempt owns the run and passes the remaining records itself.
            return

    def _follow(self, *, is_last: bool) -> bool:
        """Return whether the tracker got all records."""
        reader = MetricsReader(self._subject.run.metrics)
        self._subject.memory.recall()
        try:
            raise_if_fenced(self._subject.run, self._subject.attempt)
            tracker = self._connect(self._subject)
            while not self._ended.wait(_LOOK_EVERY_S):
                self._tell(tracker, reader)
            self._tell(tracker, reader)
            if self._ending is not None:
                raise_if_fenced(self._subject.run, self._subject.attempt)
                tracker.close(self._ending)
        except FencedError:
            raise
        except Exception as error:  # noqa: BLE001  trackers may raise anything; it is a warning
            self._report(error, is_last=is_last)
            return False
        finally:
            reader.close()
        return True

    def _tell(self, tracker: Tracker, reader: MetricsReader) -> None:
        memory = self._subject.memory
        while points := reader.read(_BLOCK):
            raise_if_fenced(self._subject.run, self._subject.attempt)
            new = [point for point in points if memory.takes(point.step, evaluated=point.evaluated)]
            if new:
                tracker.write(new)
                memory.save()

    def _report(self, error: Exception, *, is_last: bool) -> None:
        if self._ended.is_set() and not is_last:
            # A signal to the job may have ended the tracker's process; it is tried again at once.
            return
        reason = f"{type(error).__name__}: {' '.join(str(error).split()) or 'no reason given'}"
        later = "what it misses is in metrics.jsonl, and the next attempt tries again"
        if reason != self._warned:
            consequence = later if is_last else "it is tried again at the end"
            self._warn(f"warning: {self._tracker_name} failed ({reason}); the training goes on, {consequence}")
        self._warned = reason
