"""Loop over all optimizer steps, with evaluations, saves and stops between them."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch
import torch.distributed as dist

from hpcddp.run.job_records import RankStepTimes, write_step_times
from hpcddp.run.metrics_file import MetricsFile
from hpcddp.stop import faults
from hpcddp.train.checkpoint.checkpointer import Checkpointer
from hpcddp.train.context import TrainContext
from hpcddp.train.distributed import collective_device
from hpcddp.train.errors import NonFiniteError, StoppedError
from hpcddp.train.loop.agreement import PendingAgreement, StepPart, StepSums, Votes
from hpcddp.train.loop.evaluation import EvaluationStoppedError, Evaluator
from hpcddp.train.loop.schedule import Schedule
from hpcddp.train.loop.state import TrainingProgress
from hpcddp.train.loop.step import Position, StepOutcome, Stepper
from hpcddp.train.model.guard import ReplicaGuard
from hpcddp.train.model.noise import NoiseScale
from hpcddp.train.model.replica import Replica
from hpcddp.train.stopper import RunStopper

# Some hundred times the duration of the all-reduce of an agreement.
_SLOW_STEP_S: Final = 0.5
# The ranks agree once in this time, if steps are shorter.
_BLOCK_S: Final = 0.05
_LONGEST_BLOCK: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class _TakenStep:
    """A step of this rank, until an agreement holds it.

    Args:
        seconds: its duration.
        ended: when it ended, in seconds since the epoch.
    """

    outcome: StepOutcome
    seconds: float
    ended: float


class Loop:
    """Trains from where ``progress`` stands to the end.

    Args:
        schedule: the steps, and what is due after each.
        metrics: the metrics file, on rank 0; None on the other ranks.
        progress: how far the training is.
    """

    def __init__(
        self,
        context: TrainContext,
        schedule: Schedule,
        replica: Replica,
        *,
        stepper: Stepper,
        evaluator: Evaluator,
        checkpointer: Checkpointer,
        metrics: MetricsFile | None,
        progress: TrainingProgress,
    ) -> None:
        self._context, self._schedule, self._replica = context, schedule, replica
        self._stepper, self._evaluator, self._checkpointer, self._metrics = stepper, evaluator, checkpointer, metrics
        self._progress = progress
        self._began = self._saved_at = self._resumed_at = context.monotonic()
        self._wall_before_s = progress.wall_s
        # The steps that no agreement holds yet and their parts, and an agreement with its steps.
        self._parts: list[StepPart] = []
        self._taken: list[_TakenStep] = []
        self._pending: tuple[PendingAgreement, list[_TakenStep]] | None = None
        self._save_requested = False
        self._last_step_s = self._step_s = 0.0
        self._stopper = RunStopper(context, checkpointer)
        # The state at the start is saved already, or it is the initial one.
        self._resumed_step = progress.step or None
        self._guard = ReplicaGuard(context.train.replica_check_every)

    def run(self) -> TrainingProgress:
        """Train to the end and return the final progress.

        Raises:
            StoppedError: the ranks agreed to stop; the state is saved.
            NonFiniteError: a loss is not finite, and train.nonfinite_loss is stop.
            DriftError: the replicas of the ranks are no longer equal.
        """
        self._context.heartbeat.beat()
        if self._schedule.evaluation_missing(self._progress.step, self._progress.evaluated_step):
            self._evaluate()
        for position in self._schedule.positions(self._progress.step):
            faults.inject("step", step=position.step)
            before, slow = self._resumed_at, self._is_slow()
            outcome = self._stepper.take(position, partial(self._agree, position))
            self._resumed_at = self._context.monotonic()
            self._taken.append(
                _TakenStep(outcome=outcome, seconds=self._resumed_at - before, ended=self._context.now())
            )
            # An agreement that was started in an earlier step has arrived by now, so reading it does not block.
            self._read_pending()
            self._keep(outcome.agreement)
            if slow:
                self._read_pending()
            self._guard.check(self._replica, position.step + 1)
            self._checkpointer.settle()
            self._between_steps(position)
            self._context.heartbeat.at_step(position.step + 1)
        self._context.heartbeat.expect_long()
        # A save flushes the metrics, but an attempt that only evaluated has saved nothing.
        self._flush()
        self._checkpointer.wait()
        self._checkpointer.settle()
        return self._progress_now()

    def _is_slow(self) -> bool:
        """Return whether steps take so long that waiting for their agreement costs nothing; the same on all ranks.

        The ranks then stop after the step in which the stop was requested, and not after the next one.
        """
        return self._step_s >= _SLOW_STEP_S

    def _agree(self, position: Position, part: StepPart) -> PendingAgreement | None:
        """Take this rank's part of a step, and start the agreement if the step is the last one of its block.

        The same on all ranks: the length of a block follows from durations on which they have agreed.
        """
        self._parts.append(part)
        is_last = len(self._parts) >= self._block_length()
        if is_last or self._schedule.evaluates_after(position) or self._schedule.saves_after(position):
            return self._start_agreement()
        return None

    def _start_agreement(self) -> PendingAgreement:
        parts, self._parts = self._parts, []
        return PendingAgreement(parts, self._votes())

    def _block_length(self) -> int:
        if self._context.world_size == 1 or self._context.train.nonfinite_loss == "skip" or not self._step_s:
            return 1
        return min(_LONGEST_BLOCK, max(1, int(_BLOCK_S / self._step_s)))

    def _keep(self, agreement: PendingAgreement | None) -> None:
        """Keep an agreement that was started, and the steps that it holds, until it is read."""
        if agreement is not None:
            self._pending, self._taken = (agreement, self._taken), []

    def _votes(self) -> Votes:
        every = self._context.spec.checkpoint.every.duration
        due = every is not None and self._context.monotonic() - self._saved_at >= every.total_seconds()
        # While a write is running no save is requested; it stays due.
        due = due and self._context.is_main and not self._checkpointer.busy
        return Votes(save=due, stop=self._stopper.vote(), seconds=self._last_step_s)

    def _between_steps(self, position: Position) -> None:
        """Evaluate, save or stop, as the schedule and the agreement say; the same on all ranks."""
        evaluates, save_reason = self._schedule.evaluates_after(position), self._schedule.saves_after(position)
        if not (evaluates or save_reason or self._save_requested or self._stopper.agreed):
            return
        self._read_all()
        self._flush()
        finished = position.step + 1 == self._schedule.total_steps
        if self._stopper.agreed and not finished:
            # A stop does not wait for an evaluation; the next attempt makes it.
            raise self._stopped()
        if evaluates:
            self._evaluate()
            if self._context.spec.checkpoint.best is not None:
                # The best evaluation needs a checkpoint of its step.
                save_reason = save_reason or "evaluation"
        if save_reason or self._save_requested:
            self._save(save_reason or "the interval of checkpoint.every")
        self._save_requested = False
        self._resumed_at = self._context.monotonic()

    def _stopped(self) -> StoppedError:
        """Save the state if it is not saved yet, wait until it is written, and return the error that ends the loop."""
        step, reason = self._progress.step, self._stopper.agreed
        has_checkpoint = step == self._resumed_step
        if not has_checkpoint:
            self._save("stop")
        self._context.heartbeat.expect_long()
        saved, outcome = self._checkpointer.wait(), self._checkpointer.outcome
        self._stopper.record(step=step, saved=saved, save_s=outcome.seconds if outcome else 0.0)
        told = "saved" if saved else "not saved"
        return StoppedError(
            f"all ranks stopped after step {step} ({reason.word}), and the state is {told}",
            step=step,
            reason=reason,
            outcome=outcome,
        )

    def _read_all(self) -> None:
        """Read the agreements of all steps so far; a collective."""
        self._read_pending()
        if self._parts:
            self._keep(self._start_agreement())
            self._read_pending()

    def _read_pending(self) -> None:
        """Read the pending agreement, and add its steps to the progress and the metrics."""
        if self._pending is None:
            return
        (agreement, steps), self._pending = self._pending, None
        agreed = agreement.read()
        self._save_requested |= agreed.save
        self._stopper.set_agreed(agreed.stop)
        self._last_step_s = sum(step.seconds for step in steps) / len(steps)
        self._step_s = agreed.seconds / self._context.world_size
        for step, sums in zip(steps, agreed.steps, strict=True):
            self._add_step(step, sums)

    def _add_step(self, taken: _TakenStep, sums: StepSums) -> None:
        outcome = taken.outcome
        loss = sums.loss_sum / outcome.position.samples
        step = outcome.position.step + 1
        # The GradScaler of fp16 skips steps with a nonfinite gradient itself.
        skipped = outcome.skipped or sums.nonfinite
        self._progress = replace(
            self._progress,
            step=step,
            epoch=self._schedule.epochs_after(outcome.position),
            samples_seen=self._progress.samples_seen + outcome.position.samples,
            skipped_steps=self._progress.skipped_steps + skipped,
            last_loss=loss if math.isfinite(loss) else None,
            noise=self._progress.noise if skipped else self._observed_noise(sums, outcome.position),
        )
        self._stopper.add_step(taken.seconds)
        self._record_step(taken, loss, skipped=skipped)
        if not math.isfinite(loss) and not outcome.skipped:
            self._flush()
            raise NonFiniteError(
                f"the loss of step {step} (epoch {outcome.position.epoch}) is {loss}, and train.nonfinite_loss "
                "is stop; lower the learning rate, clip the gradient, use a wider precision, or write skip",
                step=step,
            )

    def _observed_noise(self, sums: StepSums, position: Position) -> NoiseScale | None:
        if not self._context.train.noise_scale:
            return None
        small, large = sums.norms
        noise = self._progress.noise or NoiseScale()
        return noise.observed(small=small, large=large, shares=self._schedule.shares(position.units))

    def _record_step(self, taken: _TakenStep, loss: float, *, skipped: bool) -> None:
        if self._metrics is None:
            return
        position = taken.outcome.position
        record = {
            "step": self._progress.step,
            "epoch": position.epoch,
            "loss": loss,
            "lr": position.learning_rate,
            "samples_seen": self._progress.samples_seen,
            "samples_per_s": position.samples / taken.seconds if taken.seconds > 0 else None,
            "time": taken.ended,
        }
        if self._progress.noise is not None:
            record["noise_scale"] = self._progress.noise.samples
        self._metrics.add({**record, "skipped": True} if skipped else record)

    def _evaluate(self) -> None:
        began = self._context.monotonic()
        try:
            evaluation = self._evaluator.evaluate(
                self._replica, vote=self._stopper.vote, beat=self._context.heartbeat.beat
            )
        except EvaluationStoppedError as stop:
            self._stopper.set_agreed(stop.reason)
            raise self._stopped() from None
        self._progress = replace(self._progress, evaluation=evaluation, evaluated_step=self._progress.step)
        epoch = self._progress.epoch - 1
        if self._metrics is not None:
            seconds = round(self._context.monotonic() - began, 3)
            self._metrics.add(
                {"step": self._progress.step, "epoch": epoch, **evaluation.as_record(), "eval_s": seconds}
            )
        loss = self._progress.last_loss
        self._context.print_on_rank_0(
            f"epoch {epoch + 1}/{self._schedule.epochs}, step {self._progress.step}/{self._schedule.total_steps}: "
            f"loss {math.nan if loss is None else loss:.4f}, val_loss {evaluation.val_loss:.4f}, "
            f"val_accuracy {evaluation.val_accuracy:.4f} ({evaluation.val_samples} samples)"
        )

    def _save(self, reason: str) -> None:
        self._flush()
        progress = self._progress_now()
        self._checkpointer.save(progress.step, progress.as_document(), reason=reason)
        self._record_step_times()
        self._saved_at = self._context.monotonic()
        self._context.heartbeat.beat()

    def _record_step_times(self) -> None:
        """Gather what the ranks have measured in their steps, and write it; a collective."""
        timer = self._stepper.timer
        if not timer.steps:
            return
        own = torch.tensor(timer.means(), dtype=torch.float64, device=collective_device())
        means = own.new_empty(self._context.world_size, len(own))
        dist.all_gather(list(means), own)
        if self._context.is_main:
            step_s, data_wait_s, forward_s = (tuple(column) for column in means.T.tolist())
            times = RankStepTimes(
                steps=timer.steps,
                step_s=step_s[0],
                data_wait_s=data_wait_s,
                forward_s=forward_s if any(forward_s) else None,
            )
            # A report can do without; a disk that is full or missing does not delay the training.
            with suppress(OSError):
                write_step_times(self._context.run.attempt(self._context.attempt), times)

    def _flush(self) -> None:
        if self._metrics is not None:
            self._metrics.flush()

    def _progress_now(self) -> TrainingProgress:
        wall_s = self._wall_before_s + self._context.monotonic() - self._began
        return replace(self._progress, wall_s=wall_s)
