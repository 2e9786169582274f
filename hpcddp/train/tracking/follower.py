"""Thread that follows ``metrics.jsonl`` and passes new records to one tracker."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from hpcddp.run.ownership import FencedError, raise_if_fenced
from hpcddp.train.tracking.points import MetricsReader
from hpcddp.train.tracking.protocol import Ending, Subject, Tracker

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
        self._ending: Ending | None = None
        self._warned = ""

    def end(self, ending: Ending | None) -> None:
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
