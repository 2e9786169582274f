"""Agreement of the ranks, every few batches of an evaluation, on whether to stop it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
import torch.distributed as dist

from hpcddp.batch.split import ceil_div
from hpcddp.stop.reasons import StopReason

BATCHES_BETWEEN: Final = 8
"""Batches between two agreements; shorter evaluations are not interrupted."""


class EvaluationStoppedError(Exception):
    """All ranks agreed to stop in the middle of an evaluation.

    Args:
        reason: the largest of the ranks' reasons.
    """

    def __init__(self, reason: StopReason) -> None:
        super().__init__(reason)
        self.reason = reason


class Pauses:
    """The agreements of one evaluation: equally many on every rank, even if one has a batch less than another.

    Args:
        samples: samples of the validation part.
        batch_size: the most samples in one batch.
        ranks: number of ranks.
        device: device of the collectives.
        vote: returns this rank's reason to stop.
    """

    def __init__(
        self, samples: int, batch_size: int, *, ranks: int, device: torch.device, vote: Callable[[], StopReason]
    ) -> None:
        # Shares differ by one sample at most, so a rank has `most` batches or one less. No agreement follows the last
        # batch.
        most = ceil_div(ceil_div(samples, ranks), batch_size)
        self._left = (most - 1) // BATCHES_BETWEEN
        self._device, self._vote = device, vote
        self._batches = 0

    def after_batch(self) -> None:
        """Count a batch, and agree with the other ranks if an agreement is due.

        Raises:
            EvaluationStoppedError: the ranks agreed to stop.
        """
        self._batches += 1
        if self._batches % BATCHES_BETWEEN == 0 and self._left:
            self._agree()

    def _agree(self) -> None:
        self._left -= 1
        largest = torch.tensor(int(self._vote()), device=self._device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        if reason := StopReason(int(largest.item())):
            raise EvaluationStoppedError(reason)
