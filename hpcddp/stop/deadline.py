"""The time at which a training stops so that a save fits before the job's end, from measured steps and saves."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

_MOST_DURATIONS: Final = 512
_PERCENTILE: Final = 0.95
_MARGIN_S: Final = 10.0
# Votes are read one step later, so up to two steps follow after a rank has looked at its clock.
_STEPS_AHEAD: Final = 2
_UNKNOWN_SAVE_FRACTION: Final = 0.02
_LONGEST_UNKNOWN_SAVE_S: Final = 60.0


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
class Deadline:
    """The end of the job by a rank's clock.

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

    def is_near(self, now: float, *, step_s: float | None, save_s: float | None) -> bool:
        """Return whether it is time to stop.

        Args:
            now: seconds since the epoch.
            step_s: the 95th percentile of steps; None before the first.
            save_s: the 95th percentile of saves; None before the first.
        """
        return self.end_time is not None and now >= self.end_time - self.need_s(step_s, save_s)


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
