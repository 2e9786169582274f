"""Waits for collectives that another thread can end.

gloo may wait for ever although its connections are shut down. When a connection ends, it fails the messages that wait,
but not the one that was partly sent or received (``Pair::signalException`` in gloo/transport/tcp/pair.cc).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

import torch.distributed as dist
from torch.futures import Future

T = TypeVar("T")

# One of the phrases by which hpcddp knows that another rank was lost.
_ENDED: Final = "the communicator was aborted: another rank has gone"


class CollectiveWaits:
    """The collectives of this process's group that have not ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._can_end = False
        self._has_ended = False
        # The result of each is the text of its error, or None.
        self._outcomes: set[Future[str | None]] = set()

    def begin(self) -> None:
        """Begin with a new process group, whose waits another thread may end."""
        with self._lock:
            self._can_end = True
            self._has_ended = False
            # Nobody waits any more for those of the group before.
            self._outcomes.clear()

    def end(self) -> None:
        """End the waits for all collectives of the group with an error, those that follow too."""
        with self._lock:
            self._has_ended = True
            outcomes = list(self._outcomes)
        for outcome in outcomes:
            _settle(outcome, _ENDED)

    def future(self, work: dist.Work, result: Callable[[], T]) -> Future[T]:
        """Return a future that fails with a collective, or at ``end``.

        Args:
            work: the collective.
            result: returns the result of the future after the collective has succeeded.
        """
        if not self._can_end:
            return work.get_future().then(lambda done: _result_of_work(done, result))
        outcome: Future[str | None] = Future()
        with self._lock:
            self._outcomes.add(outcome)
            has_ended = self._has_ended
        if has_ended:
            _settle(outcome, _ENDED)
        work.get_future().add_done_callback(lambda done: self._complete(outcome, done))
        return outcome.then(lambda settled: _result(settled, result))

    def run(self, collective: Callable[..., dist.Work | None], *tensors: object, **options: object) -> None:
        """Run a collective of ``torch.distributed`` with these arguments, and wait for it.

        Raises:
            RuntimeError: it has failed, or its wait was ended.
        """
        if not self._can_end:
            collective(*tensors, **options)
            return
        work = collective(*tensors, async_op=True, **options)
        # None where this process has no part in it.
        if work is not None:
            self.wait(work)

    def wait(self, work: dist.Work) -> None:
        """Wait for a collective.

        Raises:
            RuntimeError: it has failed, or its wait was ended.
        """
        if self._can_end:
            self.future(work, _no_result).wait()
        else:
            work.wait()

    def _complete(self, outcome: Future[str | None], done: Future[Any]) -> None:
        error = None
        try:
            done.value()
        except RuntimeError as failure:
            error = str(failure)
        except Exception as failure:  # noqa: BLE001  torch would only log it, and the wait would not end
            error = f"{type(failure).__name__}: {failure}"
        with self._lock:
            self._outcomes.discard(outcome)
        _settle(outcome, error)


def _settle(outcome: Future[str | None], error: str | None) -> None:
    # The other thread may have settled it already.
    with suppress(RuntimeError):
        outcome.set_result(error)


def _result(outcome: Future[str | None], result: Callable[[], T]) -> T:
    error = outcome.value()
    if error is not None:
        raise RuntimeError(error)
    return result()


def _result_of_work(done: Future[Any], result: Callable[[], T]) -> T:
    # Raises the error of the collective.
    done.value()
    return result()


def _no_result() -> None:
    pass


WAITS: Final = CollectiveWaits()
"""The waits of this process."""
