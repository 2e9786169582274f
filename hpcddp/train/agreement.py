"""What the ranks tell each other once per step, in one small sum: the loss, and who wants what.

Nothing that differs between ranks is ever decided by one of them alone (batch contract, section 4). The sum is read one
step later, so that no step waits for it, and costs no collective of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from hpcddp.stop.reasons import StopReason

STOP_CODES: Final = int(max(StopReason))
"""The largest stop code: a ``StopReason``. When ranks have different reasons in one step, the largest wins."""

_LOSS, _NONFINITE, _SMALL, _LARGE, _SECONDS, _SAVE = range(6)
_SLOTS: Final = _SAVE + 1 + STOP_CODES


@dataclass(frozen=True, slots=True, kw_only=True)
class Votes:
    """What one rank wants, and how long it took.

    Args:
        save: whether a save is due; only rank 0 looks at its clock.
        stop: 0, or the code of a reason to stop, 1..``STOP_CODES``.
        seconds: how long the rank's last step took; 0 if there was none.
    """

    save: bool = False
    stop: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.stop <= STOP_CODES:
            raise ValueError(f"a stop code is 0..{STOP_CODES}, not {self.stop}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What all ranks know after a step, the same on each.

    Args:
        loss_sum: the sum of the losses of the global batch's samples.
        nonfinite: whether a gradient is infinite or not a number on any rank; False unless somebody looked.
        norms: (small, large) of the gradient noise scale; zeros unless it is measured.
        save: whether a save is due.
        stop: 0, or the code of the reason to stop.
        seconds: the sum of the ranks' times for their last steps.
    """

    loss_sum: float = 0.0
    nonfinite: bool = False
    norms: tuple[float, float] = (0.0, 0.0)
    save: bool = False
    stop: int = 0
    seconds: float = 0.0

    def merged(self, later: Agreed) -> Agreed:
        """Return the wishes of two steps; the loss and the time are the later one's."""
        return Agreed(
            loss_sum=later.loss_sum,
            nonfinite=later.nonfinite,
            save=self.save or later.save,
            stop=max(self.stop, later.stop),
            seconds=later.seconds,
        )


class PendingAgreement:
    """A sum under way."""

    def __init__(
        self, loss_sum: Tensor, votes: Votes, nonfinite: Tensor | None = None, norms: Tensor | None = None
    ) -> None:
        """Start the sum over all ranks.

        Args:
            loss_sum: this rank's sum of losses, a float64 scalar on the device.
            votes: what this rank wants.
            nonfinite: a scalar on the device that is not 0 if this rank's gradients are not finite; None = not looked.
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
        # On a GPU waiting for the collective orders streams and does not hold the host.
        self._work.wait()
        host = torch.empty(_SLOTS, dtype=torch.float64, pin_memory=True)
        host.copy_(self._vector, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()
        self._vector = host

    def read(self) -> Agreed:
        """Return what was agreed; waits for the step if it still runs."""
        if self._agreed is None:
            if self._event is None:
                self._work.wait()
            else:
                self._event.synchronize()
            self._agreed = _agreed(self._vector.tolist())
        return self._agreed


def _agreed(sums: list[float]) -> Agreed:
    stops = [code for code in range(1, STOP_CODES + 1) if sums[_SAVE + code] > 0]
    return Agreed(
        loss_sum=sums[_LOSS],
        nonfinite=sums[_NONFINITE] != 0,
        norms=(sums[_SMALL], sums[_LARGE]),
        save=sums[_SAVE] > 0,
        stop=max(stops, default=0),
        seconds=sums[_SECONDS],
    )
