"""State of the built-in training: its progress, and what a checkpoint of it holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import IO, Any, Final

import torch
import torch.distributed as dist

from hpcddp.run.checkpoints import MANIFEST, Checkpoint, InvalidCheckpointError, Manifest
from hpcddp.train.checkpoint.staging import Staging
from hpcddp.train.checkpoint.start import load_file, loading
from hpcddp.train.checkpoint.writer import CheckpointWriter, SaveOutcome
from hpcddp.train.context import TrainContext
from hpcddp.train.errors import NonFiniteError, ResumeError
from hpcddp.train.loop.evaluation import Evaluation
from hpcddp.train.model.merging import gather_differing, gather_samples, take_rows
from hpcddp.train.model.noise import NoiseScale
from hpcddp.train.model.replica import Replica


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a training is.

    Args:
        step: optimizer steps done.
        epoch: the epoch that the next step belongs to, zero-based.
        samples_seen: samples trained on, repeats counted.
        skipped_steps: updates skipped because a loss or gradient was not finite.
        wall_s: seconds spent in ``run_training`` over all attempts, up to here.
        last_loss: loss of the last step; None before the first, or if it was not finite.
        evaluation: the last evaluation; None before the first.
        evaluated_step: optimizer steps done at the last evaluation; None before the first.
        noise: the gradient noise scale; None where it is not measured.
    """

    step: int = 0
    epoch: int = 0
    samples_seen: int = 0
    skipped_steps: int = 0
    wall_s: float = 0.0
    last_loss: float | None = None
    evaluation: Evaluation | None = None
    evaluated_step: int | None = None
    noise: NoiseScale | None = None

    def as_document(self) -> dict[str, Any]:
        """Return the progress as a JSON document; numbers that are not finite become null."""
        document = asdict(self)
        if self.evaluation is not None:
            document["evaluation"] = {
                name: value if math.isfinite(value) else None for name, value in self.evaluation.as_record().items()
            }
        return document

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Progress:
        """Return the progress that ``as_document`` wrote."""
        evaluation = document["evaluation"]
        if evaluation is not None:
            numbers: dict[str, Any] = {name: math.nan if value is None else value for name, value in evaluation.items()}
            evaluation = Evaluation(**numbers)
        # Checkpoints of earlier versions have no such entry.
        noise = document.get("noise")
        return cls(**{**document, "evaluation": evaluation, "noise": noise and NoiseScale(**noise)})


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


def restore(checkpoint: Checkpoint, replica: Replica) -> Progress:
    """Load a verified checkpoint into this rank's replica.

    If the number of ranks is the same as at the save, each rank gets back its own buffers and their number of samples.
    Otherwise all ranks get the merged buffers, with equal numbers of samples.

    Returns:
        The progress of the training at the save.

    Raises:
        ResumeError: the checkpoint is of another model or optimizer.
        InvalidCheckpointError: the checkpoint can no longer be read.
    """
    _refuse_other_average(checkpoint, replica)
    progress = progress_of(checkpoint)
    replica.samples = progress.samples_seen // dist.get_world_size()
    with loading(checkpoint, "train.model and train.optimizer"):
        replica.model.load_state_dict(load_file(checkpoint, MODEL_FILE))
        if replica.ema is not None:
            replica.ema.model.load_state_dict(load_file(checkpoint, EMA_FILE))
        if RANKS_FILE in checkpoint.manifest.files:
            saved = load_file(checkpoint, RANKS_FILE)
            if saved["world_size"] == dist.get_world_size():
                take_rows(replica.models, saved["buffers"])
                # Checkpoints of earlier versions have no numbers of samples.
                replica.samples = saved.get("samples", {dist.get_rank(): replica.samples})[dist.get_rank()]
        training = load_file(checkpoint, OPTIMIZER_FILE)
        replica.optimizer.load_state_dict(training["optimizer"])
        if replica.scaler.is_enabled() and training["scaler"]:
            replica.scaler.load_state_dict(training["scaler"])
    return progress


def progress_of(checkpoint: Checkpoint) -> Progress:
    """Return the progress of a training from a checkpoint's manifest.

    Raises:
        InvalidCheckpointError: the manifest is damaged; earlier versions wrote it without a checksum.
    """
    manifest = checkpoint.manifest
    try:
        progress = Progress.from_document(manifest.progress)
    except (TypeError, KeyError, AttributeError) as error:
        raise InvalidCheckpointError(
            f"{checkpoint.path / MANIFEST} is damaged (its progress is not that of a training: {error})"
        ) from error
    if progress.step != manifest.step:
        raise InvalidCheckpointError(
            f"{checkpoint.path / MANIFEST} is damaged (its step is {manifest.step}, that of its progress "
            f"{progress.step})"
        )
    return progress


def _refuse_other_average(checkpoint: Checkpoint, replica: Replica) -> None:
    saved = EMA_FILE in checkpoint.manifest.files
    if saved == (replica.ema is not None):
        return
    raise ResumeError(
        f"{checkpoint.path.name} was saved {'with' if saved else 'without'} averaged weights, and now train.ema_decay "
        f"is {'null' if saved else 'given'}, so that the average cannot go on; bring the old value back, or submit a "
        "new run"
    )
