"""How far a run is, and how fast, by the last lines of its metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hpcddp.run.metrics import MetricsLine

_LOSS_NAMES: Final = ("loss", "train_loss", "train/loss")
# The steps of a block, 50 ms together, are recorded at the same moment.
_SHORTEST_S: Final = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """How far a run is.

    Args:
        step: optimizer steps done.
        loss: ``loss`` of the last step, or ``train_loss``, ``train/loss``; None where it was not finite, or not logged.
        samples_per_s: over the last steps, evaluations and saves included; that of the last step if they are too few;
            None if it is not known.
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
            total_steps: of the whole run; None if unknown.
            now: seconds since the epoch.
        """
        if total_steps is None or not self.steps_per_s:
            return None
        return max(0.0, (total_steps - self.step) / self.steps_per_s - (now - self.time))


def progress_of(metrics: Sequence[MetricsLine], *, since: float = 0.0, written: float = 0.0) -> RunProgress | None:
    """Return how far a run is, or None before its first step.

    Args:
        metrics: the last lines of its ``metrics.jsonl``.
        since: the speed is that of later steps only, in seconds since the epoch: when the newest attempt began.
        written: when the file was written last, in seconds since the epoch: the time of lines that have none.
    """
    timed_lines = []
    for line in metrics:
        if line.time is not None:
            timed_lines.append((line.time, line))
        elif not line.evaluations():
            # Code of the user's own may log what it likes, and an evaluation has no time of its own.
            timed_lines.append((written, line))
    loss_name = _loss_name([line for _, line in timed_lines])
    lines_with_loss = [(time, line) for time, line in timed_lines if loss_name in line.facts]
    steps = lines_with_loss or timed_lines
    if not steps:
        return None
    last_time, last = steps[-1]
    samples_per_s, steps_per_s = _speed([(time, line) for time, line in steps if time >= since])
    return RunProgress(
        step=last.step,
        loss=last.number(loss_name),
        samples_per_s=samples_per_s,
        steps_per_s=steps_per_s,
        time=last_time,
    )


def _loss_name(lines: Sequence[MetricsLine]) -> str:
    """Return the first name of a loss that any line has; the usual one if none has one."""
    for name in _LOSS_NAMES:
        if any(name in line.facts for line in lines):
            return name
    return _LOSS_NAMES[0]


def _speed(steps: Sequence[tuple[float, MetricsLine]]) -> tuple[float | None, float | None]:
    """Return samples and steps per second, evaluations and saves between them included."""
    if not steps:
        return None, None
    first_time, first = steps[0]
    last_time, last = steps[-1]
    seconds = last_time - first_time
    if seconds < _SHORTEST_S:
        return last.number("samples_per_s"), None
    steps_done = last.step - first.step
    steps_per_s = steps_done / seconds if steps_done > 0 else None
    samples_before = first.number("samples_seen")
    samples_after = last.number("samples_seen")
    if samples_before is None or samples_after is None:
        return last.number("samples_per_s"), steps_per_s
    return (samples_after - samples_before) / seconds, steps_per_s


def time_written(path: Path) -> float:
    """Return when a file was written last, in seconds since the epoch; 0 without one."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
