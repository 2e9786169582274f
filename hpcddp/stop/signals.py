"""Hearing signals without doing anything in a handler.

Python runs a handler between two bytecodes of the main thread, so not while that thread waits in a collective. The
number of the signal, however, goes to the wake-up descriptor at once (``signal.set_wakeup_fd``), and a helper thread
that waits there hears it whatever the main thread does. The handlers themselves do nothing but be there. Standard
library only: a task listens before it imports anything heavy.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
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
"""The signals that are listened to, and what each says."""

_SUBMITIT_TAKES: Final = (signal.SIGCONT,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A signal that arrived; only the first of each kind is kept.

    Args:
        signum: which one.
        monotonic: when, on this process's monotonic clock in seconds.
        time: when, in seconds since the epoch.
    """

    signum: signal.Signals
    monotonic: float
    time: float

    @property
    def reason(self) -> StopReason:
        """What it says."""
        return REASONS[self.signum]


def be_there(signum: int, frame: FrameType | None) -> None:
    """Do nothing: Python writes to the wake-up descriptor for signals that have a handler, and that is enough."""


def _write_to_stderr(text: str) -> None:
    # Past Python's buffers and locks, which the main thread may hold.
    os.write(2, text.encode())


class SignalListener:
    """Listens to the signals of ``REASONS``.

    Args:
        say: writes a line that ends in a newline.

    Attributes:
        meaning: what a signal means, for the line that is said about it.
    """

    def __init__(self, say: Callable[[str], object] = _write_to_stderr) -> None:
        self._say = say
        self.meaning = "the training will be saved and stop at the end of a step"
        self._seen: dict[signal.Signals, Seen] = {}
        self._to: Callable[[signal.Signals], object] | None = None
        self._callbacks: list[Callable[[Seen], object]] = []
        self._lock = threading.Lock()
        self._previous: dict[int, Any] = {}
        self._ends: tuple[socket.socket, socket.socket] | None = None
        self._previous_descriptor = -1

    @property
    def installed(self) -> bool:
        """Whether this process listens."""
        return self._ends is not None

    def install(self) -> None:
        """Begin to listen. Call it in the main thread; a second call changes nothing."""
        if self._ends is not None:
            return
        hearing, waking = self._ends = socket.socketpair()
        waking.settimeout(0)
        # Before the handlers, or a signal between the two would be lost.
        self._previous_descriptor = signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
        self._previous = {signum: signal.signal(signum, be_there) for signum in REASONS}
        os.register_at_fork(after_in_child=self._forget)
        threading.Thread(target=self._hear, args=(hearing,), name="hpcddp-signals", daemon=True).start()

    def reinstall(self) -> None:
        """Put the handlers back after somebody has put others in their place; nothing was lost in between."""
        for signum in REASONS:
            signal.signal(signum, be_there)
        for signum in _SUBMITIT_TAKES:
            signal.signal(signum, signal.SIG_DFL)

    def close(self) -> None:
        """Stop listening, and give the signals back to whoever had them."""
        if self._ends is None:
            return
        hearing, waking = self._ends
        for signum, handler in self._previous.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._previous_descriptor)
        self._ends = None
        waking.close()
        # The thread reads the end of the stream and closes its side.
        del hearing

    def reason(self) -> StopReason:
        """Return the weightiest reason heard so far."""
        return max((seen.reason for seen in list(self._seen.values())), default=StopReason.NONE)

    def first(self, signum: signal.Signals) -> Seen | None:
        """Return the first signal of a kind, or None if none came."""
        return self._seen.get(signum)

    def call(self, callback: Callable[[Seen], object]) -> None:
        """Have ``callback`` called for the first signal of each kind, also for those that came before this call.

        Each call has a thread of its own, so that it may wait, fail, or take long.
        """
        with self._lock:
            self._callbacks.append(callback)
            earlier = list(self._seen.values())
        for seen in earlier:
            _start(callback, seen)

    def pass_on(self, to: Callable[[signal.Signals], object], *, more: Sequence[signal.Signals] = ()) -> None:
        """Have every signal handed on as it comes, beside all else. Call it in the main thread.

        Args:
            to: gets each signal, in the thread that hears; it must not wait.
            more: signals that are listened to from now on only to be handed on.
        """
        self._to = to
        for signum in more:
            signal.signal(signum, be_there)

    def _hear(self, hearing: socket.socket) -> None:
        with hearing:
            while numbers := hearing.recv(64):
                for number in numbers:
                    if self._to is not None:
                        self._to(signal.Signals(number))
                    self._note(number)

    def _note(self, number: int) -> None:
        # Other handlers of this process, torch's of SIGCHLD for one, write to the same descriptor.
        if number not in REASONS:
            return
        signum = signal.Signals(number)
        with self._lock:
            if signum in self._seen:
                return
            seen = self._seen[signum] = Seen(signum=signum, monotonic=time.monotonic(), time=time.time())
            callbacks = list(self._callbacks)
        clock = time.strftime("%H:%M:%S", time.localtime(seen.time))
        self._say(f"hpcddp: {clock} {signum.name}: {self.meaning}\n")
        for callback in callbacks:
            _start(callback, seen)

    def _forget(self) -> None:
        """In a forked child: its signals are its own. It may be told to end, and is not ended by the warning."""
        if self._ends is None:
            return
        signal.set_wakeup_fd(-1)
        for signum, handler in self._previous.items():
            if signal.getsignal(signum) is be_there:
                warning = signum == signal.SIGUSR2
                signal.signal(signum, signal.SIG_IGN if warning or handler is None else handler)


LISTENER: Final = SignalListener()
"""The listener of this process: signals are the process's, so there is one."""


def _start(callback: Callable[[Seen], object], seen: Seen) -> None:
    threading.Thread(target=callback, args=(seen,), name=f"hpcddp-{seen.signum.name}", daemon=True).start()
