"""One optimizer step: forward and backward of its micro-steps, agreement of the ranks, update.

The order of the operations is that of the batch contract, section 4.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

import torch
from torch import Tensor, nn

from hpcddp.batch.plan import BatchPlan
from hpcddp.jobfile.sections import Train
from hpcddp.train.buffers import copy_buffers, restore_buffers
from hpcddp.train.data.parts import MicroBatch
from hpcddp.train.errors import UserCodeError
from hpcddp.train.loop.agreement import PendingAgreement, StepPart, StepSums
from hpcddp.train.losses import Reduction, Share
from hpcddp.train.model.noise import nonfinite_gradient
from hpcddp.train.model.normalisation import synchronised_batch_norms
from hpcddp.train.model.objective import ModelOutputs, choose_loss, no_rows, zero_loss
from hpcddp.train.model.replica import Replica, set_learning_rate
from hpcddp.train.randomness import seed_step


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
class StepOutcome:
    """Result of a step whose work the device may still be doing.

    Args:
        skipped: whether the update was skipped because of a nonfinite loss or gradient. If only fp16's GradScaler skips
            steps, the agreement says so instead.
        agreement: the agreement that was started in this step, perhaps not yet complete; None = it comes later.
    """

    position: Position
    skipped: bool
    agreement: PendingAgreement | None


T = TypeVar("T")
# On a GPU the forward of one step in so many is timed: an event costs the host some microseconds.
_TIMED_ON_GPU_EVERY: Final = 16


class StepTimer:
    """Measures the parts of this rank's steps in which it waits for no other rank.

    The first step is left out: it also starts the loader's workers, and may compile the model.

    Args:
        device: the device of the rank; a forward on a GPU is timed there.
        times_forward: whether the forward contains no collective.
    """

    def __init__(self, device: torch.device, *, times_forward: bool) -> None:
        self._is_cuda, self._times_forward = device.type == "cuda", times_forward
        self._step = -1
        self._reset()

    def _reset(self) -> None:
        self._began = self._step_s = self._data_wait_s = self._forward_s = 0.0
        self._samples = self._timed_samples = 0
        # The events around a forward on the GPU, and the samples of it.
        self._events: tuple[torch.cuda.Event, torch.cuda.Event, int] | None = None

    @property
    def steps(self) -> int:
        """The steps that were measured."""
        return max(0, self._step)

    def begin_step(self) -> None:
        """Begin a step."""
        self._step += 1
        if self._step == 1:
            self._reset()
        self._began = time.perf_counter()

    def end_step(self) -> None:
        """End the step."""
        self._step_s += time.perf_counter() - self._began

    def next_batch(self, batches: Iterator[MicroBatch]) -> MicroBatch:
        """Return the next micro-batch, and measure the wait for it."""
        began = time.perf_counter()
        batch = next(batches)
        self._data_wait_s += time.perf_counter() - began
        self._samples += len(batch[1])
        return batch

    def forward(self, compute: Callable[[], T], samples: int) -> T:
        """Return the result of a forward of so many samples, and measure its duration."""
        if not self._times_forward:
            return compute()
        if self._is_cuda:
            return self._forward_on_gpu(compute, samples)
        began = time.perf_counter()
        result = compute()
        self._forward_s += time.perf_counter() - began
        self._timed_samples += samples
        return result

    def _forward_on_gpu(self, compute: Callable[[], T], samples: int) -> T:
        if self._step % _TIMED_ON_GPU_EVERY or not self._read_events():
            return compute()
        began, ended = _timing_event(), _timing_event()
        began.record()
        result = compute()
        ended.record()
        self._events = began, ended, samples
        return result

    def _read_events(self) -> bool:
        """Add the forward that was timed last, and return whether the GPU has done it; the host does not wait."""
        if self._events is None:
            return True
        began, ended, samples = self._events
        # torch leaves the method without types.
        is_done: Callable[[], bool] = ended.query
        if not is_done():
            return False
        milliseconds: float = began.elapsed_time(ended)
        self._forward_s += milliseconds / 1000
        self._timed_samples += samples
        self._events = None
        return True

    def means(self) -> tuple[float, float, float]:
        """Return the mean duration of a step, its wait for data and its forward, in seconds; 0 = not measured."""
        self._read_events()
        steps = max(1, self.steps)
        forward_s = self._forward_s / max(1, self._timed_samples) * self._samples
        return self._step_s / steps, self._data_wait_s / steps, forward_s / steps


def _timing_event() -> torch.cuda.Event:
    # torch leaves the class without types.
    new_event: Callable[..., torch.cuda.Event] = torch.cuda.Event
    return new_event(enable_timing=True)


class Stepper:
    """Makes optimizer steps on one rank.

    Args:
        plan: the split of global batches.
        batches: this rank's micro-batches in order, without empty ones.

    Attributes:
        timer: the parts of the steps in which this rank waits for no other.
    """

    def __init__(
        self, replica: Replica, plan: BatchPlan, train: Train, batches: Iterator[MicroBatch], rank: int
    ) -> None:
        self._replica, self._plan, self._train, self._batches, self._rank = replica, plan, train, batches, rank
        self._loss = choose_loss(train, replica.placeholder.device)
        self._shares = functools.cache(plan.rank_share)
        waits = self._loss.reduction is Reduction.GLOBAL or synchronised_batch_norms(replica.model)
        self.timer = StepTimer(replica.placeholder.device, times_forward=not waits)

    def take(self, position: Position, agree: Callable[[StepPart], PendingAgreement | None]) -> StepOutcome:
        """Make one step.

        Args:
            position: the step.
            agree: called before the update with this rank's part of the step's sums. It returns the agreement that it
                has started, which holds this step alone if ``train.nonfinite_loss`` is skip; None if it started none.
        """
        self.timer.begin_step()
        replica = self._replica
        if replica.norms is not None:
            replica.norms.begin()
        if replica.statistics is not None:
            replica.statistics.begin()
        seed_step(self._train.seed, position.step, self._rank, replica.placeholder.device)
        set_learning_rate(replica.optimizer, position.learning_rate)
        before = copy_buffers(replica.model) if self._train.nonfinite_loss == "skip" else None
        loss_sum = self._accumulate(position)
        if replica.statistics is not None:
            replica.statistics.merge()
        replica.scaler.unscale_(replica.optimizer)
        nonfinite = self._nonfinite_gradient()
        agreement = agree(StepPart(loss_sum, nonfinite, self._gradient_norms(position)))
        skipped = before is not None and agreement is not None and _is_nonfinite(agreement.read().steps[-1])
        if skipped and before is not None:
            restore_buffers(replica.model, before)
        else:
            update(replica, self._train.clip_grad_norm, nonfinite if before is None else None)
        replica.scaler.update()
        replica.optimizer.zero_grad(set_to_none=True)
        self.timer.end_step()
        return StepOutcome(position=position, skipped=skipped, agreement=agreement)

    def _accumulate(self, position: Position) -> Tensor:
        """Run forward and backward of all micro-steps and return this rank's sum of losses, float64."""
        shares = self._shares(position.units, self._rank)
        losses: list[Tensor] = []
        for micro_step, share in enumerate(shares):
            last = micro_step == len(shares) - 1
            # The forward belongs inside: there DDP decides whether the backward reduces gradients.
            with contextlib.nullcontext() if last else self._replica.no_sync():
                if share:
                    losses.append(self._backward(self.timer.next_batch(self._batches), position.samples))
                else:
                    # Rank 0 has samples whenever some rank has.
                    others = bool(self._shares(position.units, 0)[micro_step])
                    losses.append(self._backward_nothing(position.samples, others_have_samples=others))
        self._refuse_unreached(position)
        return sum(losses[1:], start=losses[0])

    def _refuse_unreached(self, position: Position) -> None:
        """Raise if some parameter got no gradient: otherwise the other ranks would wait for its all-reduce forever.

        Raises:
            UserCodeError: names the first parameter without a gradient.
        """
        try:
            self._replica.check_gradients()
        except RuntimeError as error:
            named = self._replica.model.named_parameters()
            unreached = [name for name, parameter in named if parameter.requires_grad and parameter.grad is None]
            raise UserCodeError(
                f"in step {position.step + 1} no gradient reached {(unreached or ['some parameters'])[0]} on rank "
                f"{self._rank}, and train.model uses all of its parameters on other samples; give the model an "
                "attribute find_unused_parameters = True"
            ) from error

    def _backward(self, batch: MicroBatch, global_samples: int) -> Tensor:
        """Run one micro-step and return its sum of losses, float64, without gradient."""
        inputs, labels = batch
        replica = self._replica
        replica.samples += len(labels)
        # DDP averages over ranks, not over samples: the loss of a share is weighted so that the average over ranks is
        # the loss of the global batch (batch contract, section 0).
        with replica.precision.autocast():
            share = self._share(len(labels), global_samples)
            loss = self.timer.forward(lambda: self._loss.of_share(replica.parallel(inputs), labels, share), len(labels))
        torch.autograd.backward(replica.scaler.scale(loss.backward))
        return loss.logged * global_samples

    def _backward_nothing(self, global_samples: int, *, others_have_samples: bool) -> Tensor:
        """Run one micro-step without samples and return its sum of losses, like ``_backward``.

        The sum is 0, except for a loss with reduction ``global``, which every rank computes and logs a part of.
        """
        device = self._replica.placeholder.device
        logged = torch.zeros((), dtype=torch.float64, device=device)

        def loss_of(outputs: ModelOutputs) -> Tensor:
            if self._loss.reduction is not Reduction.GLOBAL:
                return zero_loss(outputs)
            labels = torch.empty(0, dtype=torch.int64, device=device)
            loss = self._loss.of_share(no_rows(outputs), labels, self._share(0, global_samples))
            logged.copy_(loss.logged)
            return loss.backward

        self._replica.backward_placeholder(others_have_samples=others_have_samples, loss_of=loss_of)
        return logged * global_samples

    def _share(self, samples: int, global_samples: int) -> Share:
        return Share(samples=samples, global_samples=global_samples, world_size=self._plan.world_size)

    def _nonfinite_gradient(self) -> Tensor | None:
        """Return whether a gradient is nonfinite; None if that does not skip the step."""
        if self._train.nonfinite_loss != "skip" and not self._replica.scaler.is_enabled():
            return None
        return nonfinite_gradient(self._replica.model)

    def _gradient_norms(self, position: Position) -> Tensor | None:
        replica = self._replica
        if replica.norms is None:
            return None
        share = sum(self._shares(position.units, self._rank))
        # get_scale() would wait for the device.
        scale = replica.scaler.scale(torch.ones((), dtype=torch.float64, device=replica.placeholder.device))
        return replica.norms.read(replica.model, share=share, samples=position.units, scale=scale)


def _is_nonfinite(sums: StepSums) -> bool:
    return sums.nonfinite or not math.isfinite(sums.loss_sum)


def update(replica: Replica, clip_grad_norm: float | None, overflowed: Tensor | None = None) -> None:
    """Clip the gradient, step the optimizer and update the averaged weights.

    Args:
        replica: its gradients are averaged over ranks and unscaled.
        clip_grad_norm: the largest norm of the gradient; None does not clip.
        overflowed: a scalar on the device that is not 0 if the GradScaler skips the step; None if it does not.
    """
    if clip_grad_norm is not None:
        nn.utils.clip_grad_norm_(replica.model.parameters(), clip_grad_norm)
    replica.scaler.step(replica.optimizer)
    if replica.ema is not None:
        replica.ema.update(replica.model, overflowed)
