"""Heartbeat of a rank, and a watchdog thread that acts when the heartbeat stops."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_FIRST_TIMEOUT_S: Final = 30 * 60.0
_FIRST_FACTOR: Final = 6.0
_SLOWEST_FACTOR: Final = 10.0
_LONGEST_POLL_S: Final = 1.0
# Shorter than the 30 s after which status and why say that there is no output.
_SILENT_AFTER_S: Final = 20.0
_POLLS_PER_TIMEOUT: Final = 10.0
# On a busy host, a thread may wake this much later than it asked for.
_BUSY_HOST_S: Final = 3.0
# A rank that stood still learns soon after it has resumed that the other ranks have failed.
_STANDSTILL_MEMORY_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatGap:
    """The time without a heartbeat.

    Args:
        seconds: since the last heartbeat.
        step: optimizer steps done then; None before the first.
    """

    seconds: float
    step: int | None


class Heartbeat:
    """The heartbeat of a rank, and its watchdog.

    Before the first step, which may compile, the watchdog waits at least half an hour. After it, it waits for
    ``timeout_s``, or for ten times the longest step, batch of an evaluation or save if that is more, and never longer
    than before the first step.

    Args:
        timeout_s: seconds; ``launch.hang_timeout``.
        on_hang: called once, in the watchdog's thread.
        on_silence: called in the watchdog's thread when no heartbeat has come for 20 s after the first step; once for
            each such time, and not where a long wait is expected.
        monotonic: seconds on a clock that never goes back.
    """

    def __init__(
        self,
        timeout_s: float = float("inf"),
        on_hang: Callable[[HeartbeatGap], object] = lambda _: None,
        on_silence: Callable[[], object] = lambda: None,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._configured_s = timeout_s
        self._on_hang = on_hang
        self._on_silence = on_silence
        self._is_silence_told = False
        self._monotonic = monotonic
        self._last = monotonic()
        self._looked = self._last
        self._slowest_s = 0.0
        self._step: int | None = None
        self._long_wait = False
        self._last_standstill_s = 0.0
        self._resumed = float("-inf")
        self._running = False
        self._ended = threading.Event()
        self._given_up = threading.Event()

    @property
    def step(self) -> int | None:
        """Optimizer steps done at the last boundary; None before the first."""
        return self._step

    @property
    def first_timeout_s(self) -> float:
        """How long the watchdog waits before the first step, and at most ever, in seconds."""
        return max(_FIRST_TIMEOUT_S, _FIRST_FACTOR * self._configured_s)

    @property
    def timeout_s(self) -> float:
        """How long the watchdog waits now, in seconds."""
        if self._step is None or self._long_wait:
            return self.first_timeout_s
        return min(self.first_timeout_s, max(self._configured_s, _SLOWEST_FACTOR * self._slowest_s))

    def beat(self) -> None:
        """Record progress: a batch was evaluated, or a save was made."""
        was_announced = self._long_wait
        waited_since = self._last
        self._wait_again()
        if self._step is not None and not was_announced:
            self._slowest_s = max(self._slowest_s, self._last - waited_since)

    def expect_long(self) -> None:
        """Allow the next heartbeat to take as long as the first step: one rank writes, the others wait for it."""
        self._wait_again()
        self._long_wait = True

    def at_step(self, step: int) -> None:
        """Record progress at the boundary after ``step`` optimizer steps."""
        self.beat()
        self._step = step

    def gap(self) -> HeartbeatGap:
        """Return the time since the last heartbeat."""
        return HeartbeatGap(seconds=self._monotonic() - self._last, step=self._step)

    def stood_still_s(self) -> float:
        """Return how long the watchdog thread did not run until a moment ago, in seconds; 0 if it ran.

        The whole process did not run then: it was stopped, or its host was. A time too short for the watchdogs of the
        other ranks counts as 0: they have not given this rank up for it.
        """
        now = self._monotonic()
        pause_s = now - self._looked
        if not self._running or pause_s <= self._standstill_threshold_s:
            pause_s = 0.0
            if now - self._resumed < _STANDSTILL_MEMORY_S:
                pause_s = self._last_standstill_s
        if pause_s <= self.timeout_s / 2:
            return 0.0
        return pause_s

    def start(self) -> None:
        """Start the watchdog."""
        self._last = self._monotonic()
        self._looked = self._last
        self._running = True
        threading.Thread(target=self._watch, name="hpcddp-watchdog", daemon=True).start()

    def stop(self) -> None:
        """End the watchdog."""
        self._running = False
        self._ended.set()

    def _wait_again(self) -> None:
        """Begin to wait for the next heartbeat."""
        if self._given_up.is_set():
            # Too late: the failure record is written, and the watchdog ends this process.
            self._ended.wait()
        self._last = self._monotonic()
        self._is_silence_told = False
        self._long_wait = False

    @property
    def _poll_s(self) -> float:
        return min(_LONGEST_POLL_S, self._configured_s / _POLLS_PER_TIMEOUT)

    @property
    def _standstill_threshold_s(self) -> float:
        return self._poll_s + _BUSY_HOST_S

    def _watch(self) -> None:
        while not self._ended.wait(self._poll_s):
            self.look()
            if self.gap().seconds > self.timeout_s:
                self._given_up.set()
                self._on_hang(self.gap())
                return

    def look(self) -> None:
        """Record that the watchdog runs, and call ``on_silence`` if it is time.

        Time in which the process did not run counts toward no timeout and no silence: a job that Slurm suspends and
        resumes continues to train.
        """
        now = self._monotonic()
        pause_s = now - self._looked
        if pause_s > self._standstill_threshold_s:
            self._last_standstill_s = pause_s
            self._resumed = now
            self._last += pause_s
        self._looked = now
        takes_long = self._step is None or self._long_wait
        if now - self._last > _SILENT_AFTER_S and not takes_long and not self._is_silence_told:
            self._is_silence_told = True
            self._on_silence()
