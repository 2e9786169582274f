"""Signal listener: receive signals in a thread, with handlers that do nothing.

Python runs a handler between two bytecodes of the main thread, so not while that thread waits in a collective. It
writes the number of the signal to the wake-up descriptor at once (``signal.set_wakeup_fd``), and a thread that reads
the descriptor receives it whatever the main thread does. This module imports the standard library only: a task
installs the listener before its slow imports.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType, MappingProxyType
from typing import Any, Final

from hpcddp.stop.reasons import StopReason

REASONS: Final[Mapping[signal.Signals, StopReason]] = MappingProxyType(
    {
        signal.SIGTERM: StopReason.TERMINATED,
        signal.SIGUSR2: StopReason.WARNED,
        signal.SIGINT: StopReason.INTERRUPTED,
    }
)
"""The signals that are received, and the stop reason of each."""


@contextmanager
def signals_held() -> Iterator[None]:
    """Block these signals in this thread while it forks processes, which inherit the mask until they change it.

    The process itself still receives them in its other threads.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, REASONS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedSignal:
    """A signal that arrived; only the first of each kind is kept.

    Args:
        monotonic: when it arrived, in seconds of the monotonic clock of this process.
        time: when it arrived, in seconds since the epoch.
    """

    signum: signal.Signals
    monotonic: float
    time: float

    @property
    def reason(self) -> StopReason:
        """Its stop reason."""
        return REASONS[self.signum]


def do_nothing(signum: int, frame: FrameType | None) -> None:
    """Do nothing: a signal needs a handler so that Python writes its number to the wake-up descriptor."""


def write_to_stderr(text: str) -> None:
    """Write a text to standard error; it is lost where that cannot be written, such as on a full disk.

    Not through Python's buffers: the main thread may hold their locks.
    """
    with suppress(OSError):
        os.write(2, text.encode())


class SignalListener:
    """Receives the signals of ``REASONS``.

    Args:
        write: writes a line that ends in a newline.

    Attributes:
        meaning: the effect of a signal, for the line that is written when one arrives.
    """

    def __init__(self, write: Callable[[str], object] = write_to_stderr) -> None:
        self._write = write
        self.meaning = "the training will be saved and stop at the end of a step"
        self._received: dict[signal.Signals, ReceivedSignal] = {}
        self._forward: Callable[[signal.Signals], object] | None = None
        self._callbacks: list[Callable[[ReceivedSignal], object]] = []
        self._lock = threading.Lock()
        self._previous: dict[int, Any] = {}
        self._ends: tuple[socket.socket, socket.socket] | None = None

    def install(self) -> None:
        """Install the handlers and start the thread. Call it in the main thread; a second call changes nothing."""
        if self._ends is not None:
            return
        read_end, write_end = self._ends = socket.socketpair()
        write_end.settimeout(0)
        # Before the handlers: a signal between the two would be lost.
        signal.set_wakeup_fd(write_end.fileno(), warn_on_full_buffer=False)
        self._previous = {signum: signal.signal(signum, do_nothing) for signum in REASONS}
        os.register_at_fork(after_in_child=self._forget)
        threading.Thread(target=self._read, args=(read_end,), name="hpcddp-signals", daemon=True).start()

    def reinstall(self) -> None:
        """Install the handlers again after other code has replaced them; no signal was lost in between."""
        for signum in REASONS:
            signal.signal(signum, do_nothing)
        # submitit installs a handler for it.
        signal.signal(signal.SIGCONT, signal.SIG_DFL)

    def reason(self) -> StopReason:
        """Return the most important reason received so far."""
        return max((received.reason for received in list(self._received.values())), default=StopReason.NONE)

    def first(self, signum: signal.Signals) -> ReceivedSignal | None:
        """Return the first signal of a kind, or None if none came."""
        return self._received.get(signum)

    def add_callback(self, callback: Callable[[ReceivedSignal], object]) -> None:
        """Call ``callback`` for the first signal of each kind, including those that arrived before.

        Each call runs in its own thread, so it may wait, fail, or take long.
        """
        with self._lock:
            self._callbacks.append(callback)
            earlier = list(self._received.values())
        for received in earlier:
            _start(callback, received)

    def forward(self, to: Callable[[signal.Signals], object], *, more: Sequence[signal.Signals] = ()) -> None:
        """Call ``to`` for every signal, in addition to the callbacks. Call it in the main thread.

        Args:
            to: gets each signal, in the thread that receives them; it must not wait.
            more: signals that are received from now on only to be forwarded.
        """
        self._forward = to
        for signum in more:
            signal.signal(signum, do_nothing)

    def _read(self, read_end: socket.socket) -> None:
        with read_end:
            while numbers := read_end.recv(64):
                for number in numbers:
                    # First, so that the log has this line before the output of a program that gets the signal.
                    self._receive(number)
                    if self._forward is not None:
                        self._forward(signal.Signals(number))

    def _receive(self, number: int) -> None:
        # Python writes every signal with a handler to the descriptor, for example torch's SIGCHLD.
        if number not in REASONS:
            return
        signum = signal.Signals(number)
        with self._lock:
            if signum in self._received:
                return
            received = ReceivedSignal(signum=signum, monotonic=time.monotonic(), time=time.time())
            self._received[signum] = received
            callbacks = list(self._callbacks)
        clock = time.strftime("%H:%M:%S", time.localtime(received.time))
        self._write(f"hpcddp: {clock} {signum.name}: {self.meaning}\n")
        for callback in callbacks:
            _start(callback, received)

    def _forget(self) -> None:
        """Restore the handlers in a forked child, and ignore the warning there; TERM ends the child."""
        if self._ends is None:
            return
        signal.set_wakeup_fd(-1)
        for signum, handler in self._previous.items():
            if signal.getsignal(signum) is do_nothing:
                warning = signum == signal.SIGUSR2
                signal.signal(signum, signal.SIG_IGN if warning or handler is None else handler)


LISTENER: Final = SignalListener()
"""The listener of this process; there is one, since signal handlers belong to the process."""


def _start(callback: Callable[[ReceivedSignal], object], received: ReceivedSignal) -> None:
    threading.Thread(target=callback, args=(received,), name=f"hpcddp-{received.signum.name}", daemon=True).start()
