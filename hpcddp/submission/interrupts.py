"""Ctrl-C and the other signals that end a command: at once, or after a submission, which is done as a whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

from hpcddp.stop.listener import write_to_stderr

# SIGTERM and a closed terminal end a command as Ctrl-C does, so that nothing stays behind.
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalInterrupt(KeyboardInterrupt):
    """A signal has interrupted a command.

    Args:
        text: what its user has to know; empty if nothing.
    """

    def __init__(self, signum: int, text: str = "") -> None:
        super().__init__(text)
        self.signum = signum


def exit_code_of(interruption: KeyboardInterrupt) -> int:
    """Return the exit code of an interrupted command: that of a program that the signal ends in a shell.

    Source: bash(1), EXIT STATUS.
    """
    signum = interruption.signum if isinstance(interruption, SignalInterrupt) else signal.SIGINT
    return 128 + signum


def _interrupt(signum: int, _frame: FrameType | None) -> None:
    raise SignalInterrupt(signum)


_DEFAULT_HANDLERS: Final = (signal.SIG_DFL, signal.default_int_handler, _interrupt)


class _HeldSignals:
    """The handler of the signals in a block of ``uninterrupted``.

    Attributes:
        first: the first one that came and waits for the end of the block; None if none came.
        are_let_through: whether one that comes interrupts at once.
        inner_blocks: how many blocks have begun inside that one and have not ended.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self.are_let_through = False
        self.inner_blocks = 0

    def __call__(self, signum: int, _frame: FrameType | None) -> None:
        if self.are_let_through:
            raise SignalInterrupt(signum)
        if self.first is None:
            # sbatch waits for its controller, which may take long.
            name = signal.Signals(signum).name
            write_to_stderr(f"hpcddp: {name}: the command ends as soon as the submission is complete or undone\n")
            self.first = signum


@contextmanager
def interrupted_by_signals(*signums: signal.Signals) -> Iterator[None]:
    """Raise ``SignalInterrupt`` at these signals in a block; without any, at each one that ends a command."""
    with _handling(_interrupt, signums or _SIGNALS):
        yield


@contextmanager
def tells_interruption() -> Iterator[None]:
    """Say of a signal that interrupts a block before its submission that nothing was submitted."""
    try:
        yield
    except KeyboardInterrupt as interruption:
        if not str(interruption):
            interruption.args = ("nothing was submitted",)
        raise


@contextmanager
def uninterrupted(done: str = "") -> Iterator[None]:
    """Hold back the signals that end a command in a block that submits a job and records it.

    Otherwise no record would name the job. In a block inside another one they wait for the end of the outer one, which
    may have submitted a job before.

    Args:
        done: what a user has to know whose signal came too late to keep the block from being done.

    Raises:
        SignalInterrupt: after the block, if a signal came in it; its text is ``done``, or the error of the block.
    """
    outer = _signals_held_now()
    if outer is not None:
        outer.inner_blocks += 1
        try:
            yield
        finally:
            outer.inner_blocks -= 1
        return
    held = _HeldSignals()
    with _handling(held, _SIGNALS):
        try:
            yield
        except Exception as error:
            if held.first is not None:
                raise SignalInterrupt(held.first, str(error)) from error
            raise
    if held.first is not None:
        raise SignalInterrupt(held.first, done)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let the signals end a part of an ``uninterrupted`` block that comes before the submission and may take long.

    In a block inside another one they still wait.

    Raises:
        SignalInterrupt: a signal comes, or has come since the block began.
    """
    held = _signals_held_now()
    if held is None or held.inner_blocks > 0:
        yield
        return
    held.are_let_through = True
    try:
        if held.first is not None:
            raise SignalInterrupt(held.first)
        yield
    finally:
        held.are_let_through = False


def _signals_held_now() -> _HeldSignals | None:
    for signum in _SIGNALS:
        handler = signal.getsignal(signum)
        if isinstance(handler, _HeldSignals):
            return handler
    return None


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None], signums: Iterable[signal.Signals]) -> Iterator[None]:
    """Handle the signals in a block that nothing else handles or ignores, as nohup has SIGHUP ignored."""
    unhandled: list[signal.Signals] = []
    # Only the main thread may install handlers, and only there they run.
    if threading.current_thread() is threading.main_thread():
        unhandled = [signum for signum in signums if signal.getsignal(signum) in _DEFAULT_HANDLERS]
    handlers_before = {signum: signal.signal(signum, handler) for signum in unhandled}
    try:
        yield
    finally:
        for signum, handler_before in handlers_before.items():
            signal.signal(signum, handler_before)
