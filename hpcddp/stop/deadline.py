"""When to stop so that a save still fits before the job's end, from measured steps and saves."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

_KEPT: Final = 512
_PERCENTILE: Final = 0.95
_MARGIN_S: Final = 10.0
# Votes are read one step late, so two steps may follow the moment in which a rank looks at its clock.
_STEPS_TO_COME: Final = 2
_UNKNOWN_SAVE_FRACTION: Final = 0.02
_LONGEST_UNKNOWN_SAVE_S: Final = 60.0


class Durations:
    """The newest measured durations of one kind of thing, in seconds."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_KEPT)

    def __len__(self) -> int:
        """Return how many are kept."""
        return len(self._seconds)

    def add(self, seconds: float) -> None:
        """Add one."""
        self._seconds.append(seconds)

    def p95(self) -> float | None:
        """Return the smallest duration that 95 of 100 do not exceed; None before the first."""
        if not self._seconds:
            return None
        return sorted(self._seconds)[math.ceil(_PERCENTILE * len(self._seconds)) - 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """The end of the job, as a rank's clock sees it.

    Args:
        end_time: seconds since the epoch; None = there is no limit.
        start_time: when the attempt began, in seconds since the epoch.
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
        return _STEPS_TO_COME * (step_s or 0.0) + save_s + _MARGIN_S

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
        lead_s: seconds; None = Slurm does not warn.
        step_s: the 95th percentile of steps; None before the first.
        save_s: the 95th percentile of saves; None before the first.
    """
    if lead_s is None or step_s is None or save_s is None or lead_s >= step_s + save_s:
        return None
    return (
        f"requeue.signal_lead is {lead_s:.0f} s, and a step takes {step_s:.1f} s and a save {save_s:.1f} s (95 of "
        f"100), so that a save may not fit before the time limit; write {math.ceil(2 * (step_s + save_s))}s or more"
    )
