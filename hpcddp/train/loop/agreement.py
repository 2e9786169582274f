"""One all-reduce per block of optimizer steps: the sums of the losses, and the requests of the ranks to save or stop.

Every decision that all ranks must take alike follows from this sum (batch contract, section 4). The sum is read one
step later, so that no step waits for it.

One agreement for several short steps costs less beside them. A backend adds three ranks or more in an order that
depends on the place of a number in its vector, and so on the length of the block. Their numbers are therefore sent as
parts whose sums are exact in any order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from hpcddp.stop.reasons import StopReason

# The vector has these numbers of each step.
_LOSS: Final = 0
_NONFINITE: Final = 1
_PER_STEP: Final = 2
# After those of all steps come these. The index of a reason to stop is ``_SAVE`` plus its number. If ranks have
# different reasons, the largest wins.
_SECONDS: Final = 0
_SAVE: Final = 1
_REQUESTS: Final = _SAVE + 1 + max(StopReason)

# A number is the sum of these many parts, each a multiple of its unit with at most 38 bits before it: 2**15 ranks can
# be added in float64 without rounding. What is smaller than the last unit, 2**-148, is lost; a number of 2**80 or more,
# or one that is not finite, is sent whole as the first part.
_PART_BITS: Final = 38
_UNITS: Final = tuple(2.0**exponent for exponent in range(42, -149, -_PART_BITS))
_WHOLE_FROM: Final = 2.0**80
_FEW_RANKS: Final = 2

# The ranks agree once in this time, if steps are shorter.
_BLOCK_S: Final = 0.05
_MOST_STEPS: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Votes:
    """Requests of one rank, and the duration of its last steps.

    Args:
        save: whether a save is due; only rank 0 reads its clock.
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
    """

    loss_sum: float
    nonfinite: bool = False

    @property
    def is_nonfinite(self) -> bool:
        """Whether the loss or a checked gradient is not finite."""
        return self.nonfinite or not math.isfinite(self.loss_sum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """Result of one agreement, the same on every rank.

    Args:
        steps: the sums of each step of the block.
        save: whether rank 0 asks for a save.
        stop: the largest reason of the ranks to stop.
        seconds: sum over the ranks of the mean durations of their last steps.
    """

    steps: list[StepSums]
    save: bool = False
    stop: StopReason = StopReason.NONE
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class StepPart:
    """This rank's part of the sums of a step, on its device.

    Args:
        loss_sum: this rank's sum of losses, a float64 scalar.
        nonfinite: a scalar that is not 0 if this rank's gradients are not finite; None = not checked.
    """

    loss_sum: Tensor
    nonfinite: Tensor | None = None

    def numbers(self) -> list[float]:
        """Return the numbers of a step on the CPU, in the order of the vector."""
        numbers = [0.0] * _PER_STEP
        numbers[_LOSS] = self.loss_sum.item()
        if self.nonfinite is not None:
            numbers[_NONFINITE] = float(self.nonfinite)
        return numbers

    def vector(self) -> Tensor:
        """Return the numbers as a tensor ``[2]``, without waiting for the device."""
        vector = self.loss_sum.new_zeros(_PER_STEP)
        vector[_LOSS] = self.loss_sum
        if self.nonfinite is not None:
            vector[_NONFINITE] = self.nonfinite
        return vector


_NO_VOTES: Final = Votes()


class PendingAgreement:
    """An all-reduce that may still be running.

    Args:
        parts: this rank's part of the sums of each step of the block.
    """

    def __init__(self, parts: Sequence[StepPart], votes: Votes = _NO_VOTES) -> None:
        self._ranks = dist.get_world_size()
        self._is_split = self._ranks > _FEW_RANKS
        self._vector: Tensor
        self._work: dist.Work | None = None
        self._copied: torch.cuda.Event | None = None
        self._agreed: Agreed | None = None
        requests = _request_numbers(votes)
        if parts[0].loss_sum.device.type == "cuda":
            self._start_on_gpu(parts, requests)
            return
        numbers = [number for part in parts for number in part.numbers()]
        if self._ranks == 1:
            self._agreed = _agreed_of([*numbers, *requests])
        else:
            self._add_over_ranks(
                torch.tensor(numbers, dtype=torch.float64), torch.tensor(requests, dtype=torch.float64)
            )

    def _start_on_gpu(self, parts: Sequence[StepPart], requests: Sequence[float]) -> None:
        """Start the all-reduce and the copy of its result to the host, and wait for neither."""
        steps = torch.cat([part.vector() for part in parts])
        pinned_requests = torch.tensor(requests, dtype=torch.float64, pin_memory=True)
        self._add_over_ranks(steps, pinned_requests.to(steps.device, non_blocking=True))
        if self._work is not None:
            # On a GPU, wait() orders the streams and does not block the host.
            self._work.wait()
        host_vector = torch.empty_like(self._vector, device="cpu", pin_memory=True)
        host_vector.copy_(self._vector, non_blocking=True)
        # torch leaves the class without types.
        new_event: Callable[[], torch.cuda.Event] = torch.cuda.Event
        self._copied = new_event()
        self._copied.record()
        self._vector = host_vector

    def _add_over_ranks(self, steps: Tensor, requests: Tensor) -> None:
        if self._is_split:
            steps = split(steps)
        self._vector = torch.cat([steps, requests])
        if self._ranks > 1:
            self._work = dist.all_reduce(self._vector, async_op=True)

    def read(self) -> Agreed:
        """Wait for the all-reduce if necessary, and return its result."""
        if self._agreed is None:
            self._wait()
            numbers: list[float] = self._vector.tolist()
            if self._is_split:
                numbers = [*joined(numbers[:-_REQUESTS]), *numbers[-_REQUESTS:]]
            self._agreed = _agreed_of(numbers)
        return self._agreed

    def _wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        elif self._work is not None:
            self._work.wait()


def _request_numbers(votes: Votes) -> list[float]:
    numbers = [0.0] * _REQUESTS
    numbers[_SECONDS] = votes.seconds
    numbers[_SAVE] = float(votes.save)
    if votes.stop:
        numbers[_SAVE + votes.stop] = 1.0
    return numbers


def _agreed_of(numbers: Sequence[float]) -> Agreed:
    """Return what the numbers of the steps and those of the requests mean, summed over the ranks."""
    requests = numbers[-_REQUESTS:]
    stop = StopReason.NONE
    # From the smallest reason to the largest.
    for reason in StopReason:
        if reason is not StopReason.NONE and requests[_SAVE + reason] > 0:
            stop = reason
    first_numbers = range(0, len(numbers) - _REQUESTS, _PER_STEP)
    return Agreed(
        steps=[
            StepSums(loss_sum=numbers[first + _LOSS], nonfinite=numbers[first + _NONFINITE] != 0)
            for first in first_numbers
        ],
        save=requests[_SAVE] > 0,
        stop=stop,
        seconds=requests[_SECONDS],
    )


def block_length(step_s: float) -> int:
    """Return the number of steps that share an agreement, from 1 to 100; their mean duration is in s, 0 = not known."""
    if step_s == 0:
        return 1
    return min(_MOST_STEPS, max(1, int(_BLOCK_S / step_s)))


def split(numbers: Tensor) -> Tensor:
    """Return float64 numbers ``[n]`` as parts ``[6 * n]``, all first parts before all second ones."""
    is_whole = ~(numbers.abs() < _WHOLE_FROM)
    rest = numbers.masked_fill(is_whole, 0.0)
    parts = []
    for unit in _UNITS:
        # Powers of two: neither the division nor the products round.
        part = torch.trunc(rest / unit) * unit
        rest = rest - part
        parts.append(part)
    parts[0] = torch.where(is_whole, numbers, parts[0])
    return torch.cat(parts)


def joined(parts: Sequence[float]) -> list[float]:
    """Return the numbers whose parts are given in the order of ``split``."""
    count = len(parts) // len(_UNITS)
    # The small parts first, so that the sum is at most one unit in the last place from the exact one.
    return [sum(reversed(parts[number::count])) for number in range(count)]
