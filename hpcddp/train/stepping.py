"""One optimizer step, in the order of the batch contract, section 4."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hpcddp.batch.plan import BatchPlan
from hpcddp.spec.job import Train
from hpcddp.train.agreement import Agreed, PendingAgreement, Votes
from hpcddp.train.buffers import copy_buffers, restore_buffers
from hpcddp.train.data.images import Batch
from hpcddp.train.objective import mean_loss
from hpcddp.train.optimizers import set_learning_rate
from hpcddp.train.randomness import seed_step
from hpcddp.train.replica import Replica


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a step lies in the training.

    Args:
        step: optimizer steps done before it, over all epochs.
        epoch: zero-based.
        step_in_epoch: zero-based.
        samples: b, samples of its global batch.
        learning_rate: the rate that it uses.
    """

    step: int
    epoch: int
    step_in_epoch: int
    samples: int
    learning_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """A step that has been handed to the device.

    Args:
        position: which step.
        agreement: its loss and the ranks' wishes, perhaps still under way.
        skipped: whether the update was left out, its loss or gradient not being finite.
    """

    position: Position
    agreement: PendingAgreement
    skipped: bool


class Stepper:
    """Makes optimizer steps on one rank.

    Args:
        replica: what is trained.
        plan: the split of global batches.
        train: the job's training.
        batches: this rank's micro-batches, in order, empty ones left out.
        rank: this rank.
    """

    def __init__(self, replica: Replica, plan: BatchPlan, train: Train, batches: Iterator[Batch], rank: int) -> None:
        self._replica, self._plan, self._train, self._batches, self._rank = replica, plan, train, batches, rank

    def take(self, position: Position, votes: Votes) -> StepOutcome:
        """Make one step.

        Args:
            position: which one.
            votes: what this rank wants.
        """
        replica = self._replica
        seed_step(self._train.seed, position.step, self._rank)
        set_learning_rate(replica.optimizer, position.learning_rate)
        before = copy_buffers(replica.model) if self._train.nonfinite_loss == "skip" else None
        loss_sum = self._accumulate(position)
        replica.scaler.unscale_(replica.optimizer)
        skipped = False
        if before is None:
            agreement = PendingAgreement(loss_sum, votes)
        else:
            agreement = PendingAgreement(loss_sum, votes, self._nonfinite_gradients())
            skipped = _is_nonfinite(agreement.read())
        if skipped and before is not None:
            restore_buffers(replica.model, before)
        else:
            self._update()
        replica.scaler.update()
        replica.optimizer.zero_grad(set_to_none=True)
        return StepOutcome(position=position, agreement=agreement, skipped=skipped)

    def _accumulate(self, position: Position) -> Tensor:
        """Run forward and backward of all micro-steps and return this rank's sum of losses, float64."""
        shares = self._plan.rank_share(position.samples, self._rank)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._replica.placeholder.device)
        for micro_step, share in enumerate(shares):
            last = micro_step == len(shares) - 1
            # The forward belongs inside: DDP decides there whether the backward will reduce.
            with contextlib.nullcontext() if last else self._replica.parallel.no_sync():
                if share:
                    loss_sum += self._backward(next(self._batches), position.samples) * share
                else:
                    self._replica.backward_placeholder()
        return loss_sum

    def _backward(self, batch: Batch, global_samples: int) -> Tensor:
        """Run one micro-step and return its mean loss, float64, without gradient."""
        inputs, labels = batch
        replica = self._replica
        with replica.precision.autocast():
            loss = mean_loss(replica.parallel(inputs), labels, self._train.label_smoothing)
        # DDP averages over ranks, never over samples: with this weight its average is the mean over the global batch
        # (batch contract, section 0).
        weight = self._plan.world_size * len(labels) / global_samples
        replica.scaler.scale(loss * weight).backward()  # type: ignore[no-untyped-call]
        return loss.detach().double()

    def _nonfinite_gradients(self) -> Tensor | None:
        if self._replica.scaler.is_enabled():
            # The scaler looks for itself, and lowers its scale.
            return None
        norm = nn.utils.get_total_norm(_gradients(self._replica.model))
        return torch.isfinite(norm).logical_not().double()

    def _update(self) -> None:
        replica = self._replica
        if self._train.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(replica.model.parameters(), self._train.clip_grad_norm)
        replica.scaler.step(replica.optimizer)


def _gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _is_nonfinite(agreed: Agreed) -> bool:
    return agreed.nonfinite or not math.isfinite(agreed.loss_sum)
