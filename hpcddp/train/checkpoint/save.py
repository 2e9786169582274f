"""Save the state of the built-in training: the files of a checkpoint, and the collectives of the ranks for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import IO, Any, Final

import torch

from hpcddp.run.checkpoints import Manifest
from hpcddp.train.checkpoint.staging import Staging
from hpcddp.train.checkpoint.writer import CheckpointWriter, SaveOutcome
from hpcddp.train.context import TrainContext
from hpcddp.train.errors import NonFiniteError
from hpcddp.train.merging import gather_differing, gather_samples
from hpcddp.train.progress import Progress
from hpcddp.train.replica import Replica

MODEL_FILE: Final = "model.pt"
OPTIMIZER_FILE: Final = "optimizer.pt"
EMA_FILE: Final = "ema.pt"
RANKS_FILE: Final = "ranks.pt"

# How long a running write may continue after the training has failed; the next attempt can then resume from it.
_ABANDON_TIMEOUT_S: Final = 5.0


def _nothing() -> None:
    pass


class Saver:
    """Saves the training: all ranks take part, and rank 0 writes in the background.

    Args:
        context: the run and this rank.
        contract: settings that must be the same in later attempts.
        information: facts that may differ in later attempts.
    """

    def __init__(self, context: TrainContext, contract: Mapping[str, Any], information: Mapping[str, Any]) -> None:
        self._context, self._contract, self._information = context, contract, information
        self._staging = Staging()
        self._writer = CheckpointWriter(
            context.run,
            attempt=context.attempt,
            keep=context.spec.checkpoint.keep,
            now=context.now,
            monotonic=context.monotonic,
            tell=context.tell,
        )

    @property
    def busy(self) -> bool:
        """Whether this rank is writing a checkpoint; never on another rank than 0."""
        return self._writer.busy

    @property
    def seconds(self) -> list[float]:
        """How long each save of this attempt took until it was published; on rank 0 only."""
        return self._writer.seconds

    def save(self, replica: Replica, progress: Progress, reason: str) -> None:
        """Copy the state after ``progress.step`` steps and start to write it.

        The training waits only for the copy, and before it for the last write if that is still running.

        Args:
            replica: this rank's replica.
            progress: the progress of the training.
            reason: why a save is made, in a few words, for the event log.

        Raises:
            NonFiniteError: a parameter is not finite; nothing is written.
            FencedError: another attempt owns the run; on rank 0.
            SaveError: the third save in a row failed; on rank 0.
        """
        began = self._context.monotonic()
        _refuse_nonfinite(replica, progress.step)
        own = {
            "world_size": self._context.world_size,
            "samples": gather_samples(replica.samples, self._context.device),
            "buffers": gather_differing(replica.models),
        }
        with replica.merged():
            if self._context.is_main:
                # The last write uses the staging buffers until it has ended.
                self._writer.wait()
                self._writer.raise_if_failing()
                staged = self._staging.copy(self._files(replica, own))
                writers = {name: partial(self._dump, content) for name, content in staged.items()}
                self._writer.start(self._manifest(progress), writers, reason=reason, began=began)

    def settle(self) -> None:
        """Report the result of the last write if it has ended; called between steps.

        Raises:
            SaveError: the third save in a row failed; on rank 0, whose end ends the other ranks.
            FencedError: another attempt owns the run; on rank 0.
        """
        self._writer.settle()

    def wait(self, alive: Callable[[], None] = _nothing) -> SaveOutcome | None:
        """Wait for the running write; a disk error is reported and returned, not raised.

        Args:
            alive: called about every second meanwhile.

        Returns:
            Its result; None if there is no write, as always on other ranks than 0.

        Raises:
            FencedError: another attempt owns the run; on rank 0.
        """
        return self._writer.wait(alive=alive)

    def finish(self) -> None:
        """Wait for the last write of a finished training.

        Raises:
            SaveError: the third save in a row failed; on rank 0.
            FencedError: another attempt owns the run; on rank 0.
        """
        self._writer.wait()
        self._writer.raise_if_failing()

    def abandon(self) -> None:
        """Give a running write a few seconds to end, before a failed training ends."""
        self._writer.join(_ABANDON_TIMEOUT_S)

    def _manifest(self, progress: Progress) -> Manifest:
        return Manifest(
            step=progress.step,
            attempt=self._context.attempt,
            time=self._context.now(),
            contract=self._contract,
            progress=progress.as_document(),
            information=self._information,
            files={},
        )

    def _files(self, replica: Replica, own: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        training = {"optimizer": replica.optimizer.state_dict(), "scaler": replica.scaler.state_dict()}
        files: dict[str, Mapping[str, Any]] = {MODEL_FILE: replica.model.state_dict(), OPTIMIZER_FILE: training}
        if replica.ema is not None:
            files[EMA_FILE] = replica.ema.model.state_dict()
        if own["buffers"]:
            files[RANKS_FILE] = own
        return files

    def _dump(self, content: Mapping[str, Any], stream: IO[bytes]) -> None:
        self._staging.wait_until_copied()
        torch.save(content, stream)


def _refuse_nonfinite(replica: Replica, step: int) -> None:
    """Raise on all ranks if a parameter is not finite; parameters are equal on all ranks."""
    names, parameters = zip(*replica.model.named_parameters(), strict=True)
    # One transfer from the device, not one per parameter.
    finite = torch.stack([torch.isfinite(parameter).all() for parameter in parameters]).tolist()
    for name, is_finite in zip(names, finite, strict=True):
        if not is_finite:
            raise NonFiniteError(
                f"after step {step} {name} is not finite, so that there is nothing worth saving; lower the learning "
                "rate, clip the gradient with train.clip_grad_norm, or use a wider precision",
                step=step,
            )
