"""The end of the job, which Slurm can move, and the time that a stop needs before it, from measured steps and saves."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_MOST_DURATIONS: Final = 512
_PERCENTILE: Final = 0.95
_MARGIN_S: Final = 10.0
# Votes are read one step later, so up to two steps follow after a rank has looked at its clock.
_STEPS_AHEAD: Final = 2
_UNKNOWN_SAVE_FRACTION: Final = 0.02
_LONGEST_UNKNOWN_SAVE_S: Final = 60.0
ASK_EVERY_S: Final = 180.0
"""How often Slurm is asked for the end of the job."""

# How long before the end is acted on it is asked for more often, and how often then.
_ASK_AHEAD_S: Final = 20.0
_ASK_NEAR_EVERY_S: Final = 5.0
# Nothing is done at an end that was asked for longer ago, unless the answer takes too long.
_RECENT_S: Final = 10.0
_ANSWER_TIMEOUT_S: Final = 5.0
_RETRY_S: Final = 1.0


class Durations:
    """The latest measured durations of one kind of work, in seconds."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_MOST_DURATIONS)

    def __len__(self) -> int:
        """Return the number of durations."""
        return len(self._seconds)

    def add(self, seconds: float) -> None:
        """Add a duration."""
        self._seconds.append(seconds)

    def p95(self) -> float | None:
        """Return the 95th percentile; None before the first duration."""
        if not self._seconds:
            return None
        return sorted(self._seconds)[math.ceil(_PERCENTILE * len(self._seconds)) - 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownEnd:
    """The end of the job as it was known at some time.

    Args:
        end_time: seconds since the epoch; None = no limit.
        time: when it was asked for, in seconds since the epoch.
    """

    end_time: float | None
    time: float


class EndTime:
    """The end of the job: ``scontrol update TimeLimit`` moves it, and so does a job that was suspended and resumed.

    It is asked for in a thread, so that no step waits for the answer: every three minutes, and every 5 s shortly before
    it is acted on.

    Args:
        known: the end as it is known at first.
        ask: asks for the end, and returns None without an answer; None = the end does not move.
        every_s: how often it is asked for while it is far away, in seconds.
        on_move: called with the new end after it has moved, in the thread.
    """

    def __init__(
        self,
        known: KnownEnd,
        ask: Callable[[], KnownEnd | None] | None = None,
        *,
        every_s: float = ASK_EVERY_S,
        on_move: Callable[[float | None], object] = lambda _: None,
    ) -> None:
        self._known = known
        self._ask = ask
        self._every_s = every_s
        self._on_move = on_move
        self._asked_at = known.time
        self._waits_since: float | None = None
        self._thread: threading.Thread | None = None

    @property
    def end_time(self) -> float | None:
        """The end by the newest answer, in seconds since the epoch; None = no limit."""
        return self._known.end_time

    def left_s(self, now: float, *, lead_s: float, pause_s: float = 0.0) -> float:
        """Return how long the job still has, in seconds; infinity without a limit, and while the answer is awaited.

        Without an answer for some seconds the end that was known before counts.

        Args:
            now: seconds since the epoch.
            lead_s: how long before the end the caller acts on it, in seconds.
            pause_s: how long the caller waits between two calls, in seconds.
        """
        known = self._known
        left_s = math.inf if known.end_time is None else known.end_time - now
        is_far = left_s > lead_s + pause_s + _ASK_AHEAD_S
        is_recent = now - known.time <= _RECENT_S + pause_s
        if is_far or is_recent or self._ask is None:
            every_s = self._every_s
            if not is_far and left_s > lead_s:
                # The caller acts on it soon.
                every_s = _ASK_NEAR_EVERY_S
            self._waits_since = None
            self._ask_again(now, every_s)
            return left_s
        if self._waits_since is None:
            self._waits_since = now
        self._ask_again(now, _RETRY_S)
        if now - self._waits_since < _ANSWER_TIMEOUT_S:
            return math.inf
        return left_s

    def _ask_again(self, now: float, after_s: float) -> None:
        """Ask in a thread if the last question is older than ``after_s``, and is no longer open."""
        is_open = self._thread is not None and self._thread.is_alive()
        if self._ask is None or is_open or now - self._asked_at < after_s:
            return
        self._asked_at = now
        self._thread = threading.Thread(target=self._update, args=(self._ask,), name="hpcddp-end-time", daemon=True)
        self._thread.start()

    def _update(self, ask: Callable[[], KnownEnd | None]) -> None:
        before = self._known
        answer = ask()
        if answer is None:
            return
        self._known = answer
        if answer.end_time != before.end_time:
            self._on_move(answer.end_time)


def moved_sentence(end_time: float | None) -> str:
    """Return the line of a log about a job whose end has moved."""
    if end_time is None:
        return "Slurm has removed the job's time limit"
    return f"Slurm has moved the end of the job to {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(end_time))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """The end of the job as the attempt began.

    Args:
        end_time: seconds since the epoch; None = no limit.
        start_time: the start of the attempt in seconds since the epoch.
    """

    end_time: float | None = None
    start_time: float = 0.0

    def need_s(self, step_s: float | None, save_s: float | None) -> float:
        """Return how many seconds before the end a rank must ask for a stop.

        Args:
            step_s: the 95th percentile of steps; None before the first.
            save_s: the 95th percentile of saves; None before the first.
        """
        if save_s is None:
            length_s = 0.0 if self.end_time is None else self.end_time - self.start_time
            save_s = min(_LONGEST_UNKNOWN_SAVE_S, max(0.0, _UNKNOWN_SAVE_FRACTION * length_s))
        return _STEPS_AHEAD * (step_s or 0.0) + save_s + _MARGIN_S


def short_lead_sentence(lead_s: float | None, step_s: float | None, save_s: float | None) -> str | None:
    """Return the warning that ``requeue.signal_lead`` is too short for a step and a save; None if it is long enough.

    Args:
        lead_s: seconds; None = Slurm sends no warning.
        step_s: the 95th percentile of steps; None before the first.
        save_s: the 95th percentile of saves; None before the first.
    """
    if lead_s is None or step_s is None or save_s is None or lead_s >= step_s + save_s:
        return None
    return (
        f"requeue.signal_lead is {lead_s:.0f} s, and a step takes {step_s:.1f} s and a save {save_s:.1f} s (95 of "
        f"100), so that a save may not fit before the time limit; write {math.ceil(2 * (step_s + save_s))}s or more"
    )
