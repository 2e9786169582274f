"""One thread for each tracker: it follows ``metrics.jsonl`` and tells the tracker, so that nothing waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from hpcddp.run.lease import FencedError, raise_if_fenced
from hpcddp.train.tracking.points import MetricsReader
from hpcddp.train.tracking.protocol import Ending, Subject, Tracker

_LOOK_EVERY_S: Final = 2.0
_BLOCK: Final = 500


class Follower(threading.Thread):
    """Tells one tracker what is written, until the attempt ends.

    A tracker that fails costs a warning. At the end it is tried once more, from where it has been told, since the
    network may be back, or the tracker's own process may have died of the signal that ended the job.

    Args:
        name: the tracker's.
        subject: what it shows.
        connect: opens the tracker; called in this thread.
        warn: is told what went wrong.
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
        """Let the follower tell the rest and close, where it is known how the attempt ended; ``join`` waits for it."""
        self._ending = ending
        self._ended.set()

    def run(self) -> None:
        """Follow to the end."""
        try:
            if not self._follow(is_last=False):
                self._ended.wait()
                self._follow(is_last=True)
        except FencedError:
            # Another attempt tells the tracker now, and has read what this one has not told.
            return

    def _follow(self, *, is_last: bool) -> bool:
        """Return whether the tracker was told everything."""
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
        except Exception as error:  # noqa: BLE001  whatever a tracker does, the training goes on
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
            # The signal that ends the job has ended the tracker's process, and it is tried again at once.
            return
        reason = f"{type(error).__name__}: {' '.join(str(error).split()) or 'no reason given'}"
        later = "what it misses is in metrics.jsonl, and the next attempt tries again"
        if reason != self._warned:
            consequence = later if is_last else "it is tried again at the end"
            self._warn(f"warning: {self._tracker_name} failed ({reason}); the training goes on, {consequence}")
        self._warned = reason
