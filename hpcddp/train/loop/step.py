"""One optimizer step on one rank: forward and backward of its micro-steps, then the update.

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
from hpcddp.train.data.loader import MicroBatch
from hpcddp.train.errors import UserCodeError
from hpcddp.train.loop.agreement import StepPart
from hpcddp.train.loop.schedule import Position
from hpcddp.train.losses import Reduction, Share
from hpcddp.train.losses.declared import first_rows, zero_of
from hpcddp.train.model.normalisation import synchronised_batch_norms
from hpcddp.train.model.objective import ModelOutputs, choose_loss
from hpcddp.train.model.replica import Replica, set_learning_rate
from hpcddp.train.randomness import seed_step

T = TypeVar("T")

# On a GPU the forward of one step in so many is timed: an event costs the host some microseconds.
_TIMED_ON_GPU_EVERY: Final = 16


class Stepper:
    """Makes optimizer steps on one rank: ``compute``, and then ``update`` or ``skip``.

    Args:
        plan: the split of global batches.
        batches: this rank's micro-batches in order, without empty ones.

    Attributes:
        timer: the parts of the steps in which this rank waits for no other.
    """

    def __init__(
        self,
        replica: Replica,
        plan: BatchPlan,
        train: Train,
        batches: Iterator[MicroBatch],
        rank: int,
    ) -> None:
        self._replica = replica
        self._plan = plan
        self._train = train
        self._batches = batches
        self._rank = rank
        # The model's buffers before the step that was begun; empty if no step is skipped.
        self._buffers_before: list[Tensor] = []
        self._loss = choose_loss(train, replica.placeholder.device)
        self._shares = functools.cache(plan.rank_share)
        forward_waits = self._loss.reduction is Reduction.GLOBAL or synchronised_batch_norms(replica.model)
        self.timer = StepTimer(replica.placeholder.device, times_forward=not forward_waits)

    def compute(self, position: Position) -> StepPart:
        """Take the micro-batches of a step, compute the mean gradient of its global batch, return this rank's sums."""
        replica = self._replica
        self.timer.begin_step()
        if replica.statistics is not None:
            replica.statistics.begin()
        seed_step(self._train.seed, position.step, self._rank, replica.placeholder.device)
        set_learning_rate(replica.optimizer, position.learning_rate)
        if self._train.nonfinite_loss == "skip":
            self._buffers_before = copy_buffers(replica.model)
        loss_sum = self._accumulate(position)
        if replica.statistics is not None:
            replica.statistics.merge()
        replica.scaler.unscale_(replica.optimizer)
        return StepPart(loss_sum, self._nonfinite_gradient())

    def update(self, part: StepPart) -> None:
        """Update the parameters with the gradient of the step that was computed, and has this part."""
        overflowed = part.nonfinite
        if self._train.nonfinite_loss == "skip":
            # The ranks have agreed that the gradient is finite.
            overflowed = None
        clip_and_step(self._replica, self._train.clip_grad_norm, overflowed)
        self._end_step()

    def skip(self) -> None:
        """Leave parameters and buffers as they were before a computed step; ``train.nonfinite_loss`` is skip."""
        restore_buffers(self._replica.model, self._buffers_before)
        self._end_step()

    def _end_step(self) -> None:
        self._replica.scaler.update()
        self._replica.optimizer.zero_grad(set_to_none=True)

    def _accumulate(self, position: Position) -> Tensor:
        """Run forward and backward of all micro-steps and return this rank's sum of losses, float64."""
        shares = self._shares(position.units, self._rank)
        losses: list[Tensor] = []
        for micro_step, share in enumerate(shares):
            reduction: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if micro_step < len(shares) - 1:
                # The ranks reduce the gradient once, in the last micro-step.
                reduction = self._replica.no_sync()
            # The forward belongs inside: there DDP decides whether the backward reduces gradients.
            with reduction:
                if share:
                    batch = self.timer.next_batch(self._batches)
                    losses.append(self._backward(batch, position.samples))
                else:
                    # Rank 0 has samples whenever some rank has.
                    others_have_samples = self._shares(position.units, 0)[micro_step] > 0
                    losses.append(self._backward_nothing(position.samples, others_have_samples=others_have_samples))
        self._refuse_unreached(position)
        return sum(losses[1:], start=losses[0])

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
                return zero_of(outputs)
            labels = torch.empty(0, dtype=torch.int64, device=device)
            loss = self._loss.of_share(first_rows(outputs, 0), labels, self._share(0, global_samples))
            logged.copy_(loss.logged)
            return loss.backward

        self._replica.backward_placeholder(others_have_samples=others_have_samples, loss_of=loss_of)
        return logged * global_samples

    def _share(self, samples: int, global_samples: int) -> Share:
        return Share(samples=samples, global_samples=global_samples, world_size=self._plan.world_size)

    def _refuse_unreached(self, position: Position) -> None:
        """Raise if some parameter got no gradient: otherwise the other ranks would wait for its all-reduce forever.

        Raises:
            UserCodeError: names the first parameter without a gradient.
        """
        try:
            self._replica.check_gradients()
        except RuntimeError as error:
            name = _first_without_gradient(self._replica.model)
            raise UserCodeError(
                f"in step {position.step + 1} no gradient reached {name} on rank "
                f"{self._rank}, and train.model uses all of its parameters on other samples; give the model an "
                "attribute find_unused_parameters = True"
            ) from error

    def _nonfinite_gradient(self) -> Tensor | None:
        """Return a float64 scalar on the device: 1 if a gradient is not finite, else 0; None if that skips no step."""
        if self._train.nonfinite_loss != "skip" and not self._replica.scaler.is_enabled():
            return None
        gradients = [parameter.grad for parameter in self._replica.model.parameters() if parameter.grad is not None]
        # The maximum norm: a sum of squares could overflow although every entry is finite.
        largest = nn.utils.get_total_norm(gradients, norm_type=math.inf)
        return torch.isfinite(largest).logical_not().double()


def _first_without_gradient(model: nn.Module) -> str:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.grad is None:
            return name
    return "some parameters"


def clip_and_step(replica: Replica, clip_grad_norm: float | None, overflowed: Tensor | None = None) -> None:
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


@dataclass(frozen=True, slots=True)
class _ForwardOnGpu:
    """A forward of so many samples that the GPU is doing, between two events."""

    began: torch.cuda.Event
    ended: torch.cuda.Event
    samples: int


class StepTimer:
    """Measures the parts of this rank's steps in which it waits for no other rank.

    The first step is left out: it also starts the loader's workers, and may compile the model.

    Args:
        device: the device of the rank; a forward on a GPU is timed there.
        times_forward: whether the forward contains no collective.
    """

    def __init__(self, device: torch.device, *, times_forward: bool) -> None:
        self._is_cuda = device.type == "cuda"
        self._times_forward = times_forward
        self._step = -1
        self._reset()

    def _reset(self) -> None:
        self._data_wait_s = 0.0
        self._samples = 0
        self._forward_s = 0.0
        self._timed_samples = 0
        self._forward_on_gpu: _ForwardOnGpu | None = None

    @property
    def steps(self) -> int:
        """The steps that were measured."""
        return max(0, self._step)

    def begin_step(self) -> None:
        """Begin a step."""
        self._step += 1
        if self._step == 1:
            self._reset()

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
            return self._time_on_gpu(compute, samples)
        began = time.perf_counter()
        result = compute()
        self._forward_s += time.perf_counter() - began
        self._timed_samples += samples
        return result

    def _time_on_gpu(self, compute: Callable[[], T], samples: int) -> T:
        if self._step % _TIMED_ON_GPU_EVERY != 0 or not self._add_forward_on_gpu():
            return compute()
        began = _new_timing_event()
        ended = _new_timing_event()
        began.record()
        result = compute()
        ended.record()
        self._forward_on_gpu = _ForwardOnGpu(began, ended, samples)
        return result

    def _add_forward_on_gpu(self) -> bool:
        """Add the forward that was timed last, and return whether the GPU has done it; the host does not wait."""
        forward = self._forward_on_gpu
        if forward is None:
            return True
        # torch leaves the method without types.
        is_done: Callable[[], bool] = forward.ended.query
        if not is_done():
            return False
        milliseconds: float = forward.began.elapsed_time(forward.ended)
        self._forward_s += milliseconds / 1000
        self._timed_samples += forward.samples
        self._forward_on_gpu = None
        return True

    def means(self) -> tuple[float, float]:
        """Return the mean wait for data in a step and the mean forward, in seconds; 0 = not measured."""
        self._add_forward_on_gpu()
        steps = max(1, self.steps)
        forward_s_per_sample = self._forward_s / max(1, self._timed_samples)
        return self._data_wait_s / steps, forward_s_per_sample * self._samples / steps


def _new_timing_event() -> torch.cuda.Event:
    # torch leaves the class without types.
    new_event: Callable[..., torch.cuda.Event] = torch.cuda.Event
    return new_event(enable_timing=True)
