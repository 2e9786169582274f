"""Evaluation of the built-in training: the outputs of the model on the validation part, for the metrics of ``scoring``.

Every few batches the ranks agree on whether to stop the evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Final

import torch
from torch import Tensor, nn

from hpcddp.batch.split import ceil_div
from hpcddp.stop.reasons import StopReason
from hpcddp.train.data.loader import Batches, Data, Placement
from hpcddp.train.model.objective import all_logits
from hpcddp.train.model.replica import Replica
from hpcddp.train.precision import Precision
from hpcddp.train.randomness import SampleKeys
from hpcddp.train.scoring import CrossEntropy, Metric, TopKAccuracy, ValidationShare, evaluate
from hpcddp.train.stopper import agree_on_stop

# Evaluations of so few batches are not interrupted.
_BATCHES_BETWEEN_CHECKS: Final = 8
_TOP: Final = 5


class EvaluationStoppedError(Exception):
    """All ranks agreed to stop in the middle of an evaluation.

    Args:
        reason: the largest of the ranks' reasons.
    """

    def __init__(self, reason: StopReason) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
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


class Evaluator:
    """Evaluates a model over all ranks.

    Args:
        placement: device and layout of the batches.
        batch_size: samples per forward, >= 1.
    """

    def __init__(
        self, data: Data, placement: Placement, *, batch_size: int, workers: int, seed: int, rank: int, world_size: int
    ) -> None:
        self._device = placement.device
        self._batch_size = batch_size
        self._world_size = world_size
        self._share = ValidationShare(len(data.val), batch_size, rank=rank, ranks=world_size)
        keys = [SampleKeys(seed=seed, split="val", epoch=0, indices=indices) for indices in self._share]
        self._batches = Batches(data, data.val, keys, placement, workers=min(workers, len(keys)))
        self._metrics: dict[str, Metric] = {"val_loss": CrossEntropy(), "val_accuracy": TopKAccuracy(1)}
        if data.classes > _TOP:
            self._metrics["val_top5"] = TopKAccuracy(_TOP)

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of the metrics that it reports."""
        return tuple(self._metrics)

    def evaluate(
        self, replica: Replica, *, vote: Callable[[], StopReason], beat: Callable[[], None]
    ) -> EvaluationResult:
        """Evaluate the averaged weights if there are any, else the model, with buffers merged over ranks.

        Calls ``beat`` after each batch, for the heartbeat, and ``vote`` every few batches, for this rank's reason to
        stop.

        Raises:
            EvaluationStoppedError: the ranks agreed to stop.
        """
        stop_checks = StopChecks(
            self._share.samples, self._batch_size, ranks=self._world_size, device=self._device, vote=vote
        )
        with replica.evaluated() as model:
            results = self._results(model, replica.precision, stop_checks, beat)
            values = evaluate(self._share, results, self._metrics, device=self._device)
        return EvaluationResult(**values, val_samples=self._share.samples)

    def _results(
        self, model: nn.Module, precision: Precision, stop_checks: StopChecks, beat: Callable[[], None]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield logits and labels of each batch of this rank's share."""
        for inputs, labels in self._batches:
            with precision.autocast():
                logits = next(all_logits(model(inputs)))
            yield logits, labels
            beat()
            stop_checks.after_batch()


class StopChecks:
    """The agreements of one evaluation: equally many on every rank, even if one has a batch less than another.

    Args:
        samples: samples of the validation part.
        batch_size: the most samples in one batch.
        device: device of the collectives.
        vote: returns this rank's reason to stop.
    """

    def __init__(
        self, samples: int, batch_size: int, *, ranks: int, device: torch.device, vote: Callable[[], StopReason]
    ) -> None:
        # Shares differ by one sample at most, so a rank has this many batches or one less. No check follows the last
        # batch.
        most_batches = ceil_div(ceil_div(samples, ranks), batch_size)
        self._checks_left = (most_batches - 1) // _BATCHES_BETWEEN_CHECKS
        self._batches_done = 0
        self._device = device
        self._vote = vote

    def after_batch(self) -> None:
        """Count a batch, and agree with the other ranks if an agreement is due.

        Raises:
            EvaluationStoppedError: the ranks agreed to stop.
        """
        self._batches_done += 1
        if self._batches_done % _BATCHES_BETWEEN_CHECKS == 0 and self._checks_left > 0:
            self._checks_left -= 1
            reason = agree_on_stop(self._vote(), self._device)
            if reason is not StopReason.NONE:
                raise EvaluationStoppedError(reason)
