"""One all-reduce per block of optimizer steps: the sums of the losses, and the requests of the ranks to save or stop.

Every decision that all ranks must take alike follows from this sum (batch contract, section 4). The sum is read one
step later, so that no step waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from hpcddp.stop.reasons import StopReason

# A step has these numbers.
_LOSS, _NONFINITE, _SMALL, _LARGE = range(4)
_PER_STEP: Final = 4
# After those of all steps come these. The number of a reason to stop is ``_SAVE`` plus its own. If ranks have different
# reasons, the largest wins.
_SECONDS, _SAVE = range(2)
_REQUESTS: Final = _SAVE + 1 + max(StopReason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Votes:
    """Requests of one rank, and the duration of its last steps.

    Args:
        save: whether a save is due; only rank 0 reads its clock.
        stop: why the rank wants to stop.
        seconds: mean duration of the rank's last steps; 0 if there was none.
    """

    save: bool = False
    stop: StopReason = StopReason.NONE
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSums:
    """What the ranks have summed up for one step, the same on every rank.

    Args:
        loss_sum: the sum of the losses of the global batch's samples.
        nonfinite: whether a gradient is infinite or not a number on any rank; False if gradients are not checked.
        norms: (small, large) of the gradient noise scale; zeros if it is not measured.
    """

    loss_sum: float
    nonfinite: bool = False
    norms: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """Result of one agreement, the same on every rank.

    Args:
        steps: the sums of each step.
        save: whether a save is due.
        stop: why the ranks stop.
        seconds: sum over the ranks of the mean durations of their last steps.
    """

    steps: tuple[StepSums, ...]
    save: bool = False
    stop: StopReason = StopReason.NONE
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class StepPart:
    """This rank's part of the sums of a step, on its device.

    Args:
        loss_sum: this rank's sum of losses, a float64 scalar.
        nonfinite: a scalar that is not 0 if this rank's gradients are not finite; None = not checked.
        norms: this rank's part of the lengths of gradients, float64 ``[2]``; None = not measured.
    """

    loss_sum: Tensor
    nonfinite: Tensor | None = None
    norms: Tensor | None = None

    def numbers(self) -> list[float]:
        """Return the numbers, of a step on the CPU."""
        nonfinite = 0.0 if self.nonfinite is None else float(self.nonfinite)
        return [self.loss_sum.item(), nonfinite, *([0.0, 0.0] if self.norms is None else self.norms.tolist())]

    def vector(self) -> Tensor:
        """Return the numbers as a tensor ``[4]``, without waiting for the device."""
        vector = self.loss_sum.new_zeros(_PER_STEP)
        vector[_LOSS] = self.loss_sum
        if self.nonfinite is not None:
            vector[_NONFINITE] = self.nonfinite
        if self.norms is not None:
            vector[_SMALL : _LARGE + 1] = self.norms
        return vector


class PendingAgreement:
    """An all-reduce that may still be running.

    Args:
        parts: this rank's part of each step of the block.
        votes: this rank's requests.
    """

    def __init__(self, parts: Sequence[StepPart], votes: Votes) -> None:
        requests = [0.0] * _REQUESTS
        requests[_SECONDS], requests[_SAVE] = votes.seconds, float(votes.save)
        if votes.stop:
            requests[_SAVE + votes.stop] = 1.0
        self._event: torch.cuda.Event | None = None
        self._work: dist.Work | None = None
        self._agreed: Agreed | None = None
        device, several = parts[0].loss_sum.device, dist.get_world_size() > 1
        if device.type == "cuda":
            on_host = torch.tensor(requests, dtype=torch.float64, pin_memory=True)
            self._vector = torch.cat([*(part.vector() for part in parts), on_host.to(device, non_blocking=True)])
        else:
            numbers = [number for part in parts for number in part.numbers()] + requests
            if not several:
                self._agreed = _agreed(numbers)
                return
            self._vector = torch.tensor(numbers, dtype=torch.float64)
        if several:
            self._work = dist.all_reduce(self._vector, async_op=True)
        if device.type == "cuda":
            self._copy_to_host()

    def _copy_to_host(self) -> None:
        if self._work is not None:
            # On a GPU, wait() orders the streams and does not block the host.
            self._work.wait()
        host = torch.empty_like(self._vector, device="cpu", pin_memory=True)
        host.copy_(self._vector, non_blocking=True)
        # torch leaves the class without types.
        new_event: Callable[[], torch.cuda.Event] = torch.cuda.Event
        self._event = new_event()
        self._event.record()
        self._vector = host

    def read(self) -> Agreed:
        """Wait for the all-reduce if necessary, and return its result."""
        if self._agreed is None:
            if self._event is not None:
                self._event.synchronize()
            elif self._work is not None:
                self._work.wait()
            self._agreed = _agreed(self._vector.tolist())
        return self._agreed


def agree_on_step(part: StepPart) -> PendingAgreement:
    """Start the agreement of a single step in which this rank requests nothing."""
    return PendingAgreement([part], Votes())


def _agreed(sums: list[float]) -> Agreed:
    requests = sums[-_REQUESTS:]
    stops = [reason for reason, ranks in enumerate(requests[_SAVE + 1 :], start=1) if ranks > 0]
    steps = range(0, len(sums) - _REQUESTS, _PER_STEP)
    return Agreed(
        steps=tuple(_step_sums(sums[first : first + _PER_STEP]) for first in steps),
        save=requests[_SAVE] > 0,
        stop=StopReason(max(stops, default=0)),
        seconds=requests[_SECONDS],
    )


def _step_sums(sums: Sequence[float]) -> StepSums:
    return StepSums(loss_sum=sums[_LOSS], nonfinite=sums[_NONFINITE] != 0, norms=(sums[_SMALL], sums[_LARGE]))
