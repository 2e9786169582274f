"""Whether an evaluation goes on: asked by all ranks alike every few batches, so that a long one holds up no stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
import torch.distributed as dist

from hpcddp.batch.split import ceil_div
from hpcddp.stop.reasons import StopReason

BATCHES_BETWEEN: Final = 8
"""Batches from one question to the next; shorter evaluations are not interrupted."""


class EvaluationStopped(Exception):  # noqa: N818  not an error: the ranks agreed
    """All ranks agreed to stop in the middle of an evaluation.

    Args:
        reason: the weightiest of the ranks' reasons.
    """

    def __init__(self, reason: StopReason) -> None:
        super().__init__(reason)
        self.reason = reason


class Pauses:
    """The questions of one evaluation: as many on every rank, also on one that has a batch less than another.

    Args:
        samples: samples of the validation part.
        batch_size: the most samples in one batch.
        ranks: ranks that evaluate.
        device: where the small tensor of a question lies.
        vote: asked for this rank's reason to stop.
    """

    def __init__(
        self, samples: int, batch_size: int, *, ranks: int, device: torch.device, vote: Callable[[], StopReason]
    ) -> None:
        # Shares differ by a sample, so a rank has this many batches or one less: no question comes after the last one.
        most = ceil_div(ceil_div(samples, ranks), batch_size)
        self._left = (most - 1) // BATCHES_BETWEEN
        self._device, self._vote = device, vote
        self._batches = 0

    def after_batch(self) -> None:
        """Count a batch, and ask if it is time.

        Raises:
            EvaluationStopped: the ranks agreed to stop.
        """
        self._batches += 1
        if self._batches % BATCHES_BETWEEN == 0 and self._left:
            self._ask()

    def _ask(self) -> None:
        self._left -= 1
        weightiest = torch.tensor(int(self._vote()), device=self._device)
        dist.all_reduce(weightiest, op=dist.ReduceOp.MAX)
        if reason := StopReason(int(weightiest.item())):
            raise EvaluationStopped(reason)
