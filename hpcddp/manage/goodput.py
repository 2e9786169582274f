"""Sum the times of the attempts of a run, and compute its goodput."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcddp.manage.attempt_times import AttemptTimes, Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Where the time on the nodes went.

    Goodput is the share of the time on the nodes that went into training steps which count, which are those that no
    later attempt has repeated or will have to repeat.

    Args:
        attempts: the times of all attempts.
        missing: which record is missing, a sentence; None if none is.
    """

    attempts: Sequence[AttemptTimes]
    missing: str | None = None

    @property
    def value(self) -> float | None:
        """The goodput, from 0 to 1; None if it is not known.

        Each attempt weighs as much as it has ranks, or all weigh the same if the ranks of one are not known.
        """
        if self.unknown is not None:
            return None
        weights = self._ranks
        if weights is None:
            weights = [1 for _ in self.attempts]
        weighted_attempts = list(zip(weights, self.attempts, strict=True))
        on_nodes_s = sum(weight * attempt.on_nodes_s for weight, attempt in weighted_attempts)
        useful_s = sum(weight * attempt.seconds.get(Phase.TRAINING, 0.0) for weight, attempt in weighted_attempts)
        return useful_s / on_nodes_s if on_nodes_s > 0 else None

    @property
    def unknown(self) -> str | None:
        """Why the goodput is not known; None if it is."""
        if self.missing is not None:
            return self.missing
        if not self.attempts:
            return "no attempt has begun"
        for attempt in self.attempts:
            if not attempt.is_end_known:
                return f"the end of attempt {attempt.number} was not recorded"
        seconds = self.seconds
        if seconds.get(Phase.PROGRAM):
            return "the program records no steps"
        if not any(seconds.get(phase) for phase in (Phase.TRAINING, Phase.LOST, Phase.HANG)):
            return "no step was recorded"
        return None

    @property
    def seconds(self) -> dict[Phase, float]:
        """The duration of each phase over all attempts."""
        return self._weighted_sums([1.0 for _ in self.attempts])

    @property
    def device_hours(self) -> dict[Phase, float] | None:
        """The same on all devices together, in hours; None if the ranks of an attempt are not known."""
        if self._ranks is None:
            return None
        return self._weighted_sums([ranks / 3600 for ranks in self._ranks])

    @property
    def total_device_hours(self) -> float | None:
        """Hours of all devices together, without the queue; None as above, and before the first attempt."""
        if not self.attempts or self._ranks is None:
            return None
        return sum(attempt.on_nodes_s * ranks for attempt, ranks in zip(self.attempts, self._ranks, strict=True)) / 3600

    def share(self, phase: Phase) -> float:
        """Return the part of a phase in the time on the nodes: of all devices, or of the nodes if those are unknown."""
        times = self.device_hours or self.seconds
        on_nodes = sum(time for phase_of_time, time in times.items() if phase_of_time is not Phase.QUEUE)
        return times.get(phase, 0.0) / on_nodes if on_nodes else 0.0

    @property
    def _ranks(self) -> list[int] | None:
        """How many ranks each attempt has; None if those of one are not known."""
        ranks = [attempt.ranks for attempt in self.attempts if attempt.ranks is not None]
        return ranks if len(ranks) == len(self.attempts) else None

    def _weighted_sums(self, weights: Sequence[float]) -> dict[Phase, float]:
        """Return the duration of each phase over all attempts, each multiplied by its weight."""
        sums: dict[Phase, float] = {}
        for weight, attempt in zip(weights, self.attempts, strict=True):
            for phase, seconds in attempt.seconds.items():
                sums[phase] = sums.get(phase, 0.0) + seconds * weight
        return {phase: sums[phase] for phase in Phase if phase in sums}
