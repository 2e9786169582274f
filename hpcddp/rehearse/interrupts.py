"""Ctrl-C and other signals that end a rehearsal: at once, or after a submission, which is recorded as a whole."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

from hpcddp.stop.listener import do_nothing

# SIGTERM and a closed terminal end it as Ctrl-C does, so that nothing stays behind.
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Raise ``KeyboardInterrupt`` at each signal that ends a rehearsal, in a block."""
    with _handling(signal.default_int_handler):
        yield


@contextmanager
def interrupted_afterwards() -> Iterator[None]:
    """Raise ``KeyboardInterrupt`` after a block if a signal came in it, also in place of its own exception.

    A submission ignores Ctrl-C from the first file to the record of the job, and the rehearsal would go on.
    """
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    wakeup_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        with _handling(do_nothing):
            yield
    finally:
        signal.set_wakeup_fd(wakeup_before)
        has_come = bool(_read(reader))
        os.close(reader)
        os.close(writer)
        if has_come:
            raise KeyboardInterrupt


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    # A signal that is ignored, as SIGHUP is under nohup, stays ignored.
    signums = [signum for signum in _SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN]
    handlers_before = {signum: signal.signal(signum, handler) for signum in signums}
    try:
        yield
    finally:
        for signum, handler_before in handlers_before.items():
            signal.signal(signum, handler_before)


def _read(descriptor: int) -> bytes:
    """Return what a pipe holds; nothing if it is empty."""
    try:
        return os.read(descriptor, len(_SIGNALS))
    except BlockingIOError:
        return b""
