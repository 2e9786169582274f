"""Evaluate a model on every validation sample exactly once, on any number of ranks (batch contract, section 7)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Final

from torch import Tensor, nn

from hpcddp.stop.reasons import StopReason
from hpcddp.train.data.images import Data
from hpcddp.train.data.loader import Batches, Placement
from hpcddp.train.objective import all_logits
from hpcddp.train.pausing import Pauses
from hpcddp.train.precision import Precision
from hpcddp.train.randomness import SampleKeys
from hpcddp.train.replica import Replica
from hpcddp.train.scoring import CrossEntropy, Metric, TopKAccuracy, ValidationShare, evaluate

_TOP: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Metrics of the whole validation part.

    Args:
        val_loss: mean cross entropy per sample, without label smoothing.
        val_accuracy: fraction of samples whose largest logit is the label's.
        val_top5: fraction of samples whose label's logit is among the five largest; None with five classes or fewer.
        val_samples: how many samples were counted.
    """

    val_loss: float
    val_accuracy: float
    val_top5: float | None = None
    val_samples: int

    def as_record(self) -> dict[str, float | int]:
        """Return the metrics that were computed, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def _nothing() -> None:
    pass


def _no_reason() -> StopReason:
    return StopReason.NONE


class Evaluator:
    """Evaluates a model over all ranks.

    Args:
        placement: device and layout of the batches.
        batch_size: samples per forward, >= 1.
        workers: loader processes.
        seed: the root seed.
    """

    def __init__(
        self, data: Data, placement: Placement, *, batch_size: int, workers: int, seed: int, rank: int, world_size: int
    ) -> None:
        self._data, self._placement, self._workers, self._seed = data, placement, workers, seed
        self._batch_size, self._ranks = batch_size, world_size
        self._share = ValidationShare(len(data.val), batch_size, rank=rank, ranks=world_size)
        self._metrics: dict[str, Metric] = {"val_loss": CrossEntropy(), "val_accuracy": TopKAccuracy(1)}
        if data.classes > _TOP:
            self._metrics["val_top5"] = TopKAccuracy(_TOP)

    def evaluate(
        self, replica: Replica, *, vote: Callable[[], StopReason] = _no_reason, beat: Callable[[], None] = _nothing
    ) -> Evaluation:
        """Evaluate the averaged weights if there are any, else the model, with buffers merged over ranks.

        Args:
            replica: the replica of this rank.
            vote: returns this rank's reason to stop; called every few batches.
            beat: called after each batch, for the heartbeat.

        Raises:
            EvaluationStoppedError: the ranks agreed to stop.
        """
        device = self._placement.device
        pauses = Pauses(self._share.samples, self._batch_size, ranks=self._ranks, device=device, vote=vote)
        with replica.evaluated() as model:
            results = _with_stop_checks(self._results(model, replica.precision), pauses, beat)
            values = evaluate(self._share, results, self._metrics, device=device)
        return Evaluation(**values, val_samples=self._share.samples)

    def _results(self, model: nn.Module, precision: Precision) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield logits and labels of each batch of this rank's share."""
        if not len(self._share):
            return
        keys = (SampleKeys(seed=self._seed, split="val", epoch=0, indices=indices) for indices in self._share)
        workers = min(self._workers, len(self._share))
        for inputs, labels in Batches(self._data, self._data.val, keys, self._placement, workers=workers):
            with precision.autocast():
                logits = next(all_logits(model(inputs)))
            yield logits, labels


def _with_stop_checks(
    results: Iterator[tuple[Tensor, Tensor]], pauses: Pauses, beat: Callable[[], None]
) -> Iterator[tuple[Tensor, Tensor]]:
    for result in results:
        yield result
        beat()
        pauses.after_batch()
