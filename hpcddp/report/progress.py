"""How far a run is, by the end of its ``metrics.jsonl``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hpcddp.run.tail import tail_records

# Some eighty steps: enough for a mean, and quick for hundreds of runs.
_TAIL_BYTES: Final = 16 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is.

    Args:
        step: optimizer steps done.
        loss: of the last step; None where it was not finite, or was not said.
        samples_per_s: over the last steps, with what lies between them; None with too few steps.
        steps_per_s: the same in steps.
        time: when the last step was made, in seconds since the epoch.
    """

    step: int
    loss: float | None
    samples_per_s: float | None
    steps_per_s: float | None
    time: float

    def eta_s(self, total_steps: int | None, now: float) -> float | None:
        """Return the seconds that are left at this speed; None if that is not known.

        Args:
            total_steps: of the whole run.
            now: seconds since the epoch.
        """
        if total_steps is None or not self.steps_per_s:
            return None
        return max(0.0, (total_steps - self.step) / self.steps_per_s - (now - self.time))


def read_progress(metrics: Path, *, since: float = 0.0) -> Progress | None:
    """Return how far a run is, or None before its first step.

    Args:
        metrics: its ``metrics.jsonl``; it need not exist.
        since: the speed is that of later steps only, in seconds since the epoch: when the newest attempt began.
    """
    found = [record for record in tail_records(metrics, _TAIL_BYTES) if "step" in record and "time" in record]
    # A function of the user's own may log what it likes.
    records = [record for record in found if "loss" in record] or found
    if not records:
        return None
    last = records[-1]
    samples_per_s, steps_per_s = _speed([record for record in records if record["time"] >= since])
    return Progress(
        step=last["step"],
        loss=last.get("loss"),
        samples_per_s=samples_per_s,
        steps_per_s=steps_per_s,
        time=last["time"],
    )


def _speed(records: Sequence[dict[str, Any]]) -> tuple[float | None, float | None]:
    """Return samples and steps per second, evaluations and saves between them included."""
    if not records:
        return None, None
    first, last = records[0], records[-1]
    seconds = last["time"] - first["time"]
    if seconds <= 0:
        return last.get("samples_per_s"), None
    steps_per_s = (last["step"] - first["step"]) / seconds
    if "samples_seen" not in first or "samples_seen" not in last:
        return last.get("samples_per_s"), steps_per_s
    return (last["samples_seen"] - first["samples_seen"]) / seconds, steps_per_s
