"""Evaluation: every validation sample exactly once, whatever the number of ranks (batch contract, section 7)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from hpcddp.batch.split import offset, part
from hpcddp.train.buffers import broadcast_buffers
from hpcddp.train.data.images import Data
from hpcddp.train.data.loader import Batches, Placement
from hpcddp.train.objective import all_logits
from hpcddp.train.replica import Replica


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What came out of one evaluation, over the whole validation part.

    Args:
        val_loss: mean cross entropy per sample, without label smoothing.
        val_accuracy: fraction of samples whose largest logit is the label's.
        val_samples: how many samples were counted.
    """

    val_loss: float
    val_accuracy: float
    val_samples: int


class Evaluator:
    """Evaluates a model over all ranks.

    Each rank takes one contiguous part; parts differ by one sample at most, and some are empty when there are fewer
    samples than ranks. Ranks return sums, reduced once in float64.

    Args:
        data: the data set.
        placement: where batches go.
        batch_size: samples per forward, >= 1.
        workers: processes that load.
        rank: this rank.
        world_size: ranks.
    """

    def __init__(
        self, data: Data, placement: Placement, *, batch_size: int, workers: int, rank: int, world_size: int
    ) -> None:
        self._data, self._placement, self._workers = data, placement, workers
        first = offset(len(data.val), world_size, rank)
        mine = range(first, first + part(len(data.val), world_size, rank))
        self._indices = [list(mine[start : start + batch_size]) for start in range(0, len(mine), batch_size)]

    def evaluate(self, replica: Replica) -> Evaluation:
        """Evaluate with the buffers of rank 0, which every rank has afterwards."""
        broadcast_buffers(replica.model)
        replica.model.eval()
        sums = torch.zeros(3, dtype=torch.float64, device=self._placement.device)
        with torch.no_grad():
            for inputs, labels in self._batches():
                sums += self._count(replica, inputs, labels)
        replica.model.train()
        dist.all_reduce(sums)
        loss, correct, samples = sums.tolist()
        return Evaluation(val_loss=loss / samples, val_accuracy=correct / samples, val_samples=int(samples))

    def _batches(self) -> Any:  # noqa: ANN401
        if not self._indices:
            return ()
        workers = min(self._workers, len(self._indices))
        return Batches(self._data, self._data.val, self._indices, self._placement, workers=workers, seed=0)

    @staticmethod
    def _count(replica: Replica, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return (sum of losses, correct, samples) of one batch, float64."""
        with replica.precision.autocast():
            logits = next(all_logits(replica.model(inputs)))
        losses = functional.cross_entropy(
            logits.to(torch.promote_types(logits.dtype, torch.float32)), labels, reduction="none"
        )
        correct = logits.argmax(dim=1) == labels
        # Filled on the device: a number that is copied there would hold the host up.
        samples = torch.full((), len(labels), dtype=torch.float64, device=losses.device)
        return torch.stack([losses.double().sum(), correct.double().sum(), samples])
