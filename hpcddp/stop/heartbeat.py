"""Noticing that a rank does not go on: a sign of life at each step, and a thread that misses it."""

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
_POLLS_PER_TIMEOUT: Final = 10.0
# A thread that sleeps may wake this much late on a busy host.
_BUSY_HOST_S: Final = 3.0
# What the others say about a rank that stood still reaches it soon after it has woken.
_MOMENT_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """What is known when a rank has not gone on for too long.

    Args:
        seconds: since the last sign of life.
        step: optimizer steps done then; None before the first.
    """

    seconds: float
    step: int | None


class Heartbeat:
    """A rank's signs of life, and the watchdog that waits for them.

    Before the first step, which may compile, the watchdog waits at least half an hour. After it, it waits for
    ``timeout_s``, or for ten times the longest wait between two signs so far if that is more, and never longer than
    before the first step.

    Args:
        timeout_s: seconds; ``launch.hang_timeout``.
        on_hang: called once, in the watchdog's thread.
        monotonic: seconds on a clock that never goes back.
    """

    def __init__(
        self,
        timeout_s: float = float("inf"),
        on_hang: Callable[[Silence], object] = lambda _: None,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._configured_s, self._on_hang, self._monotonic = timeout_s, on_hang, monotonic
        self._last = self._looked = monotonic()
        self._slowest_s = 0.0
        self._step: int | None = None
        self._patient = False
        self._still_s, self._woken = 0.0, float("-inf")
        self._running = False
        self._ended, self._given_up = threading.Event(), threading.Event()

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
        if self._step is None or self._patient:
            return self.first_timeout_s
        return min(self.first_timeout_s, max(self._configured_s, _SLOWEST_FACTOR * self._slowest_s))

    def beat(self) -> None:
        """Give a sign of life: a batch was evaluated, a save was made."""
        if self._given_up.is_set():
            # Too late: the others have been told, and the watchdog ends this process.
            self._ended.wait()
        now = self._monotonic()
        if self._step is not None:
            self._slowest_s = max(self._slowest_s, now - self._last)
        self._last = now
        self._patient = False

    def expect_long(self) -> None:
        """Say that the next sign may take as long as the first step: one rank writes, the others wait for it."""
        self.beat()
        self._patient = True

    def at_step(self, step: int) -> None:
        """Give a sign of life at the boundary after ``step`` optimizer steps."""
        self.beat()
        self._step = step

    def silence(self) -> Silence:
        """Return how long ago the last sign was."""
        return Silence(seconds=self._monotonic() - self._last, step=self._step)

    def stood_still_s(self) -> float:
        """Return for how long even the watchdog did not run until a moment ago, in seconds; 0 if it did.

        The whole process stood still then: it was stopped, or its host was.
        """
        now = self._monotonic()
        gap_s = now - self._looked
        if self._running and gap_s > self._standstill_s:
            return gap_s
        return self._still_s if now - self._woken < _MOMENT_S else 0.0

    def start(self) -> None:
        """Start the watchdog."""
        self._last = self._looked = self._monotonic()
        self._running = True
        threading.Thread(target=self._watch, name="hpcddp-watchdog", daemon=True).start()

    def stop(self) -> None:
        """End the watchdog."""
        self._running = False
        self._ended.set()

    @property
    def _poll_s(self) -> float:
        return min(_LONGEST_POLL_S, self._configured_s / _POLLS_PER_TIMEOUT)

    @property
    def _standstill_s(self) -> float:
        return self._poll_s + _BUSY_HOST_S

    def _watch(self) -> None:
        while not self._ended.wait(self._poll_s):
            self.look()
            if self.silence().seconds > self.timeout_s:
                self._given_up.set()
                self._on_hang(self.silence())
                return

    def look(self) -> None:
        """Notice that the watchdog runs. Time in which the process did not run counts toward no timeout.

        A job that Slurm suspends and resumes goes on as if nothing had been.
        """
        now = self._monotonic()
        gap_s = now - self._looked
        if gap_s > self._standstill_s:
            self._still_s, self._woken = gap_s, now
            self._last += gap_s
        self._looked = now
