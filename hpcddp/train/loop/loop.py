"""Loop over all optimizer steps, with evaluations, saves and stops between them, and account for their time."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Any, Final, NoReturn

import torch
import torch.distributed as dist

from hpcddp.run.events import append_event
from hpcddp.run.metrics_log import MetricsFile
from hpcddp.run.ownership import raise_if_fenced
from hpcddp.stop import faults
from hpcddp.train.checkpoint.checkpointer import Checkpointer
from hpcddp.train.context import TrainContext
from hpcddp.train.distributed import broadcast_numbers, collective_device
from hpcddp.train.errors import NonFiniteError, StoppedError
from hpcddp.train.loop.agreement import PendingAgreement, StepPart, StepSums, Votes, block_length
from hpcddp.train.loop.evaluation import EvaluationStoppedError, Evaluator
from hpcddp.train.loop.schedule import Position, Schedule
from hpcddp.train.loop.state import TrainingProgress
from hpcddp.train.loop.step import Stepper, StepTimer
from hpcddp.train.model.replica import Replica, ReplicaGuard
from hpcddp.train.stopper import RunStopper, agree_on_stop

# How long the ranks wait before they save the last step again, on a disk that has refused it.
_SAVE_AGAIN_S: Final = 5.0


# Some hundred times the duration of the all-reduce of an agreement: so long steps wait for theirs.
_LONG_STEP_S: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class _MadeStep:
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
    """Steps that share one agreement.

    Args:
        parts: this rank's part of the sums of each step, from before its update.
        steps: the same steps, from after their update.
        agreement: None until the last step of the block starts it.
    """

    parts: list[StepPart] = field(default_factory=list)
    steps: list[_MadeStep] = field(default_factory=list)
    agreement: PendingAgreement | None = None


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
        self._context = context
        self._schedule = schedule
        self._replica = replica
        self._stepper = stepper
        self._evaluator = evaluator
        self._checkpointer = checkpointer
        self._metrics = metrics
        self._progress = progress
        self._skips_nonfinite = context.train.nonfinite_loss == "skip"
        # An agreement that an update waits for is about one step.
        self._always_one_step = context.world_size == 1 or self._skips_nonfinite
        self._block = _Block()
        # The steps of the block before, until their agreement is read: one step later, when it has arrived.
        self._unread: tuple[list[_MadeStep], PendingAgreement] | None = None
        # Mean durations of the steps that were read last, on this rank and over all ranks; 0 = none was read yet.
        self._rank_step_s = 0.0
        self._step_s = 0.0
        self._stopper = RunStopper(context, checkpointer)
        self._account = TimeAccount()
        self._guard = ReplicaGuard(context.train.replica_check_every)
        # The step of the checkpoint that the loop began with.
        self._saved_step = progress.step if progress.step > 0 else None
        self._wall_s_before = progress.wall_s
        self._began_at = context.monotonic()
        self._step_began_at = self._began_at
        self._saved_at = self._began_at
        self._save_is_agreed = False

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
            self._make_step(position)
            self._guard.check(self._replica, position.step + 1)
            self._checkpointer.settle()
            self._stop_evaluate_or_save(position)
            self._context.heartbeat.at_step(position.step + 1)
        self._context.heartbeat.expect_long()
        self._wait_for_last_save()
        # A save flushes the metrics, but an attempt that only evaluated has saved nothing.
        self._flush()
        self._checkpointer.settle()
        return self._progress_now()

    def _wait_for_last_save(self) -> None:
        """Wait until the last step is saved, and save it again if the disk has refused it.

        Without its last checkpoint a run has not finished: its parameters would be lost.

        Raises:
            SaveError: the disk refuses it for as long as it may refuse saves.
            StoppedError: the ranks agreed to stop meanwhile.
        """
        # Only rank 0 knows whether the last write has succeeded.
        while not all(broadcast_numbers([self._checkpointer.wait()])):
            self._context.heartbeat.expect_long()
            self._stopper.set_agreed(agree_on_stop(self._stopper.vote(), collective_device()))
            if self._stopper.agreed:
                self._save_and_stop()
            time.sleep(_SAVE_AGAIN_S)
            self._save("last step again")

    def _make_step(self, position: Position) -> None:
        """Compute the gradient, update or skip, and read the agreement of the block before."""
        part = self._stepper.compute(position)
        # Before the update, so that the ranks can still skip it, and so that the sums arrive beside it.
        self._add_part(position, part)
        skipped = self._update_or_skip(part)
        ended_at = self._context.monotonic()
        seconds = ended_at - self._step_began_at
        self._step_began_at = ended_at
        self._block.steps.append(
            _MadeStep(position=position, skipped=skipped, seconds=seconds, ended_at=self._context.now())
        )
        waits = self._step_s >= _LONG_STEP_S
        self._read_agreement()
        self._close_block()
        if waits:
            # The ranks stop after the step in which the stop was requested, and not after the next one.
            self._read_agreement()

    def _add_part(self, position: Position, part: StepPart) -> None:
        """Add a step to its block, and start the agreement if the block ends with this step.

        A block ends with the same step on all ranks, at the latest before an evaluation or a save.
        """
        self._block.parts.append(part)
        length = 1 if self._always_one_step else block_length(self._step_s)
        if (
            len(self._block.parts) >= length
            or self._schedule.evaluates_after(position)
            or self._schedule.saves_after(position) is not None
        ):
            self._start_agreement()

    def _start_agreement(self) -> None:
        votes = Votes(save=self._save_is_due(), stop=self._stopper.vote(), seconds=self._rank_step_s)
        self._block.agreement = PendingAgreement(self._block.parts, votes)

    def _close_block(self) -> None:
        """Begin the next block if the agreement of this one is started."""
        if self._block.agreement is not None:
            self._unread = (self._block.steps, self._block.agreement)
            self._block = _Block()

    def _save_is_due(self) -> bool:
        """Return whether this rank asks for a save because of the time since the last one."""
        interval = self._context.spec.checkpoint.every.duration
        if interval is None:
            return False
        is_due = self._context.monotonic() - self._saved_at >= interval.total_seconds()
        # While a write is running no save is requested; it stays due.
        return is_due and self._context.is_main and not self._checkpointer.busy

    def _update_or_skip(self, part: StepPart) -> bool:
        """Update the parameters, or skip the update on all ranks; return whether it was skipped."""
        agreement = self._block.agreement
        if self._skips_nonfinite and agreement is not None and agreement.read().steps[-1].is_nonfinite:
            self._stepper.skip()
            return True
        self._stepper.update(part)
        return False

    def _record_all_steps(self) -> None:
        """Record all steps so far, and agree on those that no agreement covers yet; a collective."""
        self._read_agreement()
        if self._block.parts:
            self._start_agreement()
            self._close_block()
            self._read_agreement()

    def _read_agreement(self) -> None:
        """Wait for the agreement of the block before, if it is not read yet, and record its steps."""
        if self._unread is None:
            return
        steps, agreement = self._unread
        self._unread = None
        agreed = agreement.read()
        self._rank_step_s = sum(step.seconds for step in steps) / len(steps)
        self._step_s = agreed.seconds / self._context.world_size
        if agreed.save:
            self._save_is_agreed = True
        self._stopper.set_agreed(agreed.stop)
        for step, sums in zip(steps, agreed.steps, strict=True):
            self._record_step(step, sums)

    def _record_step(self, step: _MadeStep, sums: StepSums) -> None:
        """Add a step to the progress, the measured durations and the metrics."""
        position = step.position
        loss = sums.loss_sum / position.samples
        # The GradScaler of fp16 skips steps with a nonfinite gradient itself.
        skipped = step.skipped or sums.nonfinite
        progress = self._progress
        self._progress = replace(
            progress,
            step=position.step + 1,
            epoch=self._schedule.epochs_after(position),
            samples_seen=progress.samples_seen + position.samples,
            skipped_steps=progress.skipped_steps + skipped,
            last_loss=loss if math.isfinite(loss) else None,
        )
        self._stopper.add_step(step.seconds)
        self._account.train_s += step.seconds
        self._write_metrics(step, loss, skipped=skipped)
        if not math.isfinite(loss) and not step.skipped:
            self._flush()
            raise NonFiniteError(
                f"the loss of step {position.step + 1} (epoch {position.epoch}) is {loss}, and train.nonfinite_loss "
                "is stop; lower the learning rate, clip the gradient, use a wider precision, or write skip",
                step=position.step + 1,
            )

    def _write_metrics(self, step: _MadeStep, loss: float, *, skipped: bool) -> None:
        if self._metrics is None:
            return
        position = step.position
        record: dict[str, Any] = {
            "step": self._progress.step,
            "epoch": position.epoch,
            "loss": loss,
            "lr": position.learning_rate,
            "samples_seen": self._progress.samples_seen,
            "samples_per_s": position.samples / step.seconds if step.seconds > 0 else None,
            "time": step.ended_at,
        }
        if skipped:
            record["skipped"] = True
        self._metrics.add(record)

    def _stop_evaluate_or_save(self, position: Position) -> None:
        """Stop, or evaluate and save, as the schedule and the agreement say; the same on all ranks."""
        evaluates = self._schedule.evaluates_after(position)
        save_reason = self._schedule.saves_after(position)
        if not (evaluates or save_reason or self._save_is_agreed or self._stopper.agreed):
            return
        self._record_all_steps()
        self._flush()
        is_last_step = position.step + 1 == self._schedule.total_steps
        if self._stopper.agreed and not is_last_step:
            # A stop does not wait for an evaluation; the next attempt makes it.
            self._save_and_stop()
        if evaluates:
            self._evaluate()
            if self._context.spec.checkpoint.best is not None:
                # The best evaluation needs a checkpoint of its step.
                save_reason = save_reason or "evaluation"
        if self._save_is_agreed:
            save_reason = save_reason or "the interval of checkpoint.every"
        if save_reason is not None:
            self._save(save_reason)
        self._save_is_agreed = False
        self._step_began_at = self._context.monotonic()

    def _save_and_stop(self) -> NoReturn:
        """Save the state if it is not saved yet, wait until it is written, and raise the error that ends the loop.

        Raises:
            StoppedError: always.
        """
        step = self._progress.step
        reason = self._stopper.agreed
        # The state at the start is saved already.
        if step != self._saved_step:
            self._save("stop")
        self._context.heartbeat.expect_long()
        saved = self._checkpointer.wait()
        outcome = self._checkpointer.outcome
        self._stopper.record(step=step, saved=saved, save_s=outcome.seconds if outcome else 0.0)
        saved_text = "saved" if saved else "not saved"
        raise StoppedError(
            f"all ranks stopped after step {step} ({reason.word}), and the state is {saved_text}",
            step=step,
            reason=reason,
            outcome=outcome,
        ) from None

    def _evaluate(self) -> None:
        faults.inject("evaluation", step=self._progress.step)
        began_at = self._context.monotonic()
        try:
            evaluation = self._evaluator.evaluate(
                self._replica, vote=self._stopper.vote, beat=self._context.heartbeat.beat
            )
        except EvaluationStoppedError as stop:
            self._stopper.set_agreed(stop.reason)
            self._save_and_stop()
        self._progress = replace(self._progress, evaluation=evaluation, evaluated_step=self._progress.step)
        epoch = self._progress.epoch - 1
        seconds = self._context.monotonic() - began_at
        self._account.eval_s += seconds
        record = {"step": self._progress.step, "epoch": epoch, **evaluation.as_record(), "eval_s": round(seconds, 3)}
        if self._metrics is not None:
            self._metrics.add(record)
        loss = math.nan if self._progress.last_loss is None else self._progress.last_loss
        self._context.print_on_rank_0(
            f"epoch {epoch + 1}/{self._schedule.epochs}, step {self._progress.step}/{self._schedule.total_steps}: "
            f"loss {loss:.4f}, val_loss {evaluation.val_loss:.4f}, "
            f"val_accuracy {evaluation.val_accuracy:.4f} ({evaluation.val_samples} samples)"
        )

    def _save(self, reason: str) -> None:
        self._flush()
        progress = self._progress_now()
        began_at = self._context.monotonic()
        self._checkpointer.save(progress.step, progress.as_document(), reason=reason)
        self._account.save_s += self._context.monotonic() - began_at
        self._account.write(self._context, self._stepper.timer, progress.step)
        self._saved_at = self._context.monotonic()
        self._context.heartbeat.beat()

    def _flush(self) -> None:
        if self._metrics is not None:
            self._metrics.flush()

    def _progress_now(self) -> TrainingProgress:
        wall_s = self._wall_s_before + self._context.monotonic() - self._began_at
        return replace(self._progress, wall_s=wall_s)


class TimeAccount:
    """Adds up durations, in seconds.

    Attributes:
        train_s: of the steps.
        eval_s: of the evaluations.
        save_s: for which the training waited for saves.
    """

    def __init__(self) -> None:
        self.train_s = 0.0
        self.eval_s = 0.0
        self.save_s = 0.0

    def write(self, context: TrainContext, timer: StepTimer, step: int) -> None:
        """Gather what the ranks have measured in their steps, and write the account of a save; a collective.

        Raises:
            FencedError: another attempt owns the run; on rank 0.
        """
        rank_means = torch.tensor(timer.means(), dtype=torch.float64, device=collective_device())
        means = rank_means.new_empty(context.world_size, len(rank_means))
        dist.all_gather(list(means), rank_means)
        if not context.is_main:
            return
        data_waits, forwards = means.T.tolist()
        raise_if_fenced(context.run, context.attempt)
        # A report can do without; a disk that is full or missing does not delay the training.
        with suppress(OSError):
            append_event(
                context.run.events,
                kind="account",
                time=context.now(),
                attempt=context.attempt,
                step=step,
                train_s=round(self.train_s, 3),
                eval_s=round(self.eval_s, 3),
                save_s=round(self.save_s, 3),
                wait_s=round(timer.steps * max(data_waits), 3),
                slowest=_slowest_rank(data_waits, forwards),
            )


def _slowest_rank(data_waits: list[float], forwards: list[float]) -> dict[str, float | None] | None:
    """Return the fields of a ``SlowestRank``; None if there is one rank, or nothing was measured.

    Args:
        data_waits: for each rank, its mean wait for data in a step, in seconds.
        forwards: for each rank, its mean forward in a step, in seconds; 0 if forwards are not measured.
    """
    sums = [data_wait_s + forward_s for data_wait_s, forward_s in zip(data_waits, forwards, strict=True)]
    if len(sums) == 1 or not any(sums):
        return None
    rank = sums.index(max(sums))
    return {
        "rank": rank,
        "data_wait_s": data_waits[rank],
        "forward_s": forwards[rank] if any(forwards) else None,
        "median_s": median_low(sums),
    }
