"""Optimizer steps in blocks: all steps of a block share one agreement of the ranks.

One agreement for several short steps costs less beside them. It is started in the last step of its block and read one
step later, when it has arrived, so that no step waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from hpcddp.stop.reasons import StopReason
from hpcddp.train.loop.agreement import Agreed, PendingAgreement, StepPart, Votes
from hpcddp.train.loop.schedule import Position

# Some hundred times the duration of the all-reduce of an agreement.
_LONG_STEP_S: Final = 0.5
# The ranks agree once in this time, if steps are shorter.
_BLOCK_S: Final = 0.05
_MOST_STEPS: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeStep:
    """A step that this rank has made.

    Args:
        skipped: whether the update was skipped because of a nonfinite loss or gradient. If only fp16's GradScaler skips
            steps, the sums of the step say so instead.
        ended_at: seconds since the epoch.
    """

    position: Position
    skipped: bool
    seconds: float
    ended_at: float


@dataclass(slots=True)
class _Block:
    """Steps in their order.

    Args:
        parts: this rank's part of the sums of each step, from before its update.
        steps: the same steps, from after their update.
        agreement: None until the last step of the block starts it.
    """

    parts: list[StepPart] = field(default_factory=list)
    steps: list[MadeStep] = field(default_factory=list)
    agreement: PendingAgreement | None = None


class Blocks:
    """The block of the current step, and the block before it until its agreement is read.

    Args:
        always_one_step: whether every block is one step, whatever its duration.
    """

    def __init__(self, *, world_size: int, always_one_step: bool) -> None:
        self._world_size = world_size
        self._always_one_step = always_one_step
        self._current = _Block()
        self._previous: _Block | None = None
        # Mean durations of the steps of the block that was read last, on this rank and over all ranks. 0 = none was
        # read yet.
        self._rank_step_s = 0.0
        self._step_s = 0.0

    def add_part(self, part: StepPart) -> None:
        """Add this rank's part of the sums of a step to the current block."""
        self._current.parts.append(part)

    @property
    def is_full(self) -> bool:
        """Whether the current block has as many steps as fit into its duration; the same on all ranks."""
        return len(self._current.parts) >= self.block_length()

    def block_length(self) -> int:
        """Return the most steps of a block; the ranks have agreed on the duration that it follows from."""
        if self._always_one_step or self._step_s == 0:
            return 1
        return min(_MOST_STEPS, max(1, int(_BLOCK_S / self._step_s)))

    @property
    def steps_are_long(self) -> bool:
        """Whether steps take so long that waiting for their agreement costs nothing; the same on all ranks."""
        return self._step_s >= _LONG_STEP_S

    @property
    def has_unagreed_steps(self) -> bool:
        """Whether there are steps whose agreement has not been started."""
        return bool(self._current.parts)

    def start_agreement(self, *, save: bool, stop: StopReason) -> None:
        """Start the agreement of the current block, with this rank's requests (``Votes``)."""
        votes = Votes(save=save, stop=stop, seconds=self._rank_step_s)
        self._current.agreement = PendingAgreement(self._current.parts, votes)

    def current_step_is_nonfinite(self) -> bool:
        """Wait for the agreement of the current block, and return whether its last step is nonfinite.

        False if the agreement has not been started.
        """
        if self._current.agreement is None:
            return False
        return self._current.agreement.read().steps[-1].is_nonfinite

    def add_step(self, step: MadeStep) -> None:
        """Add a step whose part is in the current block."""
        self._current.steps.append(step)

    def close_if_complete(self) -> None:
        """Begin the next block if the agreement of the current one has been started."""
        if self._current.agreement is not None:
            self._previous = self._current
            self._current = _Block()

    def read_previous(self) -> tuple[list[MadeStep], Agreed] | None:
        """Wait for the agreement of the block before the current one, and return the steps and what was agreed.

        None if there is no such block, or it has been read.
        """
        block = self._previous
        if block is None or block.agreement is None:
            return None
        self._previous = None
        agreed = block.agreement.read()
        self._rank_step_s = sum(step.seconds for step in block.steps) / len(block.steps)
        self._step_s = agreed.seconds / self._world_size
        return block.steps, agreed
