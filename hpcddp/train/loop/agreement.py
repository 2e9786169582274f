"""One all-reduce per optimizer step: the sum of the losses, and the requests of the ranks to save or stop.

Every decision that all ranks must take alike follows from this sum (batch contract, section 4). The sum is read one
step later, so that no step waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from hpcddp.stop.reasons import StopReason

_LOSS, _NONFINITE, _SMALL, _LARGE, _SECONDS, _SAVE = range(6)
# The slot of a reason to stop is ``_SAVE`` plus its number. If ranks have different reasons, the largest wins.
_SLOTS: Final = _SAVE + 1 + max(StopReason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Votes:
    """Requests of one rank, and the duration of its last step.

    Args:
        save: whether a save is due; only rank 0 reads its clock.
        stop: why the rank wants to stop.
        seconds: duration of the rank's last step; 0 if there was none.
    """

    save: bool = False
    stop: StopReason = StopReason.NONE
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """Result of one agreement, the same on every rank.

    Args:
        loss_sum: the sum of the losses of the global batch's samples.
        nonfinite: whether a gradient is infinite or not a number on any rank; False if gradients are not checked.
        norms: (small, large) of the gradient noise scale; zeros if it is not measured.
        save: whether a save is due.
        stop: why the ranks stop.
        seconds: sum of the durations of the ranks' last steps.
    """

    loss_sum: float = 0.0
    nonfinite: bool = False
    norms: tuple[float, float] = (0.0, 0.0)
    save: bool = False
    stop: StopReason = StopReason.NONE
    seconds: float = 0.0


class PendingAgreement:
    """An all-reduce that may still be running."""

    def __init__(
        self, loss_sum: Tensor, votes: Votes, nonfinite: Tensor | None = None, norms: Tensor | None = None
    ) -> None:
        """Start the sum over all ranks.

        Args:
            loss_sum: this rank's sum of losses, a float64 scalar on the device.
            votes: this rank's requests.
            nonfinite: a scalar on the device that is not 0 if this rank's gradients are not finite; None = not checked.
            norms: this rank's part of the lengths of gradients, float64 ``[2]``; None = not measured.
        """
        vector = torch.zeros(_SLOTS, dtype=torch.float64, device=loss_sum.device)
        vector[_LOSS] = loss_sum
        if nonfinite is not None:
            vector[_NONFINITE] = nonfinite
        if norms is not None:
            vector[_SMALL : _LARGE + 1] = norms
        if votes.seconds:
            vector[_SECONDS] = votes.seconds
        if votes.save:
            vector[_SAVE] = 1.0
        if votes.stop:
            vector[_SAVE + votes.stop] = 1.0
        self._vector = vector
        self._event: torch.cuda.Event | None = None
        self._agreed: Agreed | None = None
        self._work = dist.all_reduce(vector, async_op=True)
        if vector.device.type == "cuda":
            self._copy_to_host()

    def _copy_to_host(self) -> None:
        # On a GPU, wait() orders the streams and does not block the host.
        self._work.wait()
        host = torch.empty(_SLOTS, dtype=torch.float64, pin_memory=True)
        host.copy_(self._vector, non_blocking=True)
        # torch leaves the class without types.
        new_event: Callable[[], torch.cuda.Event] = torch.cuda.Event
        self._event = new_event()
        self._event.record()
        self._vector = host

    def read(self) -> Agreed:
        """Wait for the all-reduce if necessary, and return its result."""
        if self._agreed is None:
            if self._event is None:
                self._work.wait()
            else:
                self._event.synchronize()
            self._agreed = _agreed(self._vector.tolist())
        return self._agreed


def _agreed(sums: list[float]) -> Agreed:
    stops = [reason for reason in StopReason if reason and sums[_SAVE + reason] > 0]
    return Agreed(
        loss_sum=sums[_LOSS],
        nonfinite=sums[_NONFINITE] != 0,
        norms=(sums[_SMALL], sums[_LARGE]),
        save=sums[_SAVE] > 0,
        stop=max(stops, default=StopReason.NONE),
        seconds=sums[_SECONDS],
    )
