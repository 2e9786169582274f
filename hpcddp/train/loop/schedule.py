"""Schedule of a training: the position and learning rate of each step, and the evaluations and saves after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hpcddp.batch.plan import BatchPlan, Steps
from hpcddp.batch.scaling import learning_rate_at
from hpcddp.jobfile.fields import Every
from hpcddp.jobfile.sections import LearningRate


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The position of a step in the training.

    Args:
        step: optimizer steps done before it, over all epochs.
        epoch: zero-based.
        step_in_epoch: zero-based.
        units: samples, or groups, of its global batch.
        samples: b, samples of its global batch.
    """

    step: int
    epoch: int
    step_in_epoch: int
    units: int
    samples: int
    learning_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The steps of a training, and what is due after each; the same on every rank.

    Args:
        steps: the steps of the batch plan, with a known number of samples.
        eval_every: epochs between evaluations.
        every: the job's ``checkpoint.every``.
        count_samples: samples of the global batch of an (epoch, step in the epoch); None if every unit is one sample.
    """

    steps: Steps
    epochs: int
    learning_rate: LearningRate
    eval_every: int
    every: Every
    count_samples: Callable[[int, int], int] | None = None

    @property
    def plan(self) -> BatchPlan:
        """The batch plan."""
        return self.steps.plan

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one epoch; the epoch in which a resumption has changed the batch has others."""
        return self.plan.steps_per_epoch or 0

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole training."""
        return self.steps.total(self.epochs)

    def positions(self, first_step: int) -> Iterator[Position]:
        """Yield the position of every step from ``first_step`` on, counted in steps done."""
        for step in range(first_step, self.total_steps):
            yield self.position(step)

    def position(self, step: int) -> Position:
        """Return the position of one step; after the end of the training that of a step that would follow."""
        epoch, step_in_epoch = self.steps.place(step)
        units = self.steps.plan_of(epoch).batch_size(step_in_epoch)
        samples = units
        if self.count_samples is not None:
            samples = self.count_samples(epoch, step_in_epoch)
        learning_rate = learning_rate_at(
            self.learning_rate,
            step=self.steps.schedule_step(epoch, step_in_epoch),
            steps_per_epoch=self.steps_per_epoch,
            epochs=self.epochs,
        )
        return Position(
            step=step,
            epoch=epoch,
            step_in_epoch=step_in_epoch,
            units=units,
            samples=samples,
            learning_rate=learning_rate,
        )

    def epochs_after(self, position: Position) -> int:
        """Return how many epochs are complete after this step."""
        if self.ends_epoch(position):
            return position.epoch + 1
        return position.epoch

    def ends_epoch(self, position: Position) -> bool:
        """Return whether this is the last step of its epoch."""
        return position.step_in_epoch == self.steps.count(position.epoch) - 1

    def evaluates_after(self, position: Position) -> bool:
        """Return whether an evaluation is due after this step: every ``eval_every`` epochs and at the end."""
        return self.ends_epoch(position) and self._evaluates_after_epochs(position.epoch + 1)

    def evaluation_missing(self, steps: int, evaluated_step: int | None) -> bool:
        """Return whether a training that has done ``steps`` steps was stopped just before a due evaluation."""
        if steps in (0, evaluated_step):
            return False
        epochs_done, step_in_epoch = self.steps.place(steps)
        is_between_epochs = self.steps.offset(epochs_done, step_in_epoch) == 0
        return is_between_epochs and self._evaluates_after_epochs(epochs_done)

    def _evaluates_after_epochs(self, epochs_done: int) -> bool:
        return epochs_done % self.eval_every == 0 or epochs_done == self.epochs

    def saves_after(self, position: Position) -> str | None:
        """Return why a save is due after this step, or None; saves by the clock are part of the agreement.

        Every epoch ends with a save, unless the job counts its saves in epochs. The training ends with a save.
        """
        steps_done = position.step + 1
        epochs_done = position.epoch + 1
        if steps_done == self.total_steps:
            return "end of training"
        if self.ends_epoch(position) and epochs_done % (self.every.epochs or 1) == 0:
            return "end of epoch"
        if self.every.steps is not None and steps_done % self.every.steps == 0:
            return f"every {self.every.steps} steps"
        return None
