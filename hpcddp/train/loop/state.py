"""State of the built-in training: its progress, and what a checkpoint of it holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import torch
import torch.distributed as dist

from hpcddp.batch.plan import BatchStart
from hpcddp.run.checkpoints import MANIFEST, Checkpoint, InvalidCheckpointError
from hpcddp.train.checkpoint.checkpointer import Checkpointer, SaveSettings, Stateful
from hpcddp.train.context import TrainContext
from hpcddp.train.errors import NonFiniteError, ResumeError
from hpcddp.train.loop.evaluation import EvaluationResult
from hpcddp.train.model.merging import gather_differing, gather_samples, take_rows
from hpcddp.train.model.replica import Replica

# Names of objects in a checkpoint; each has a file of its name.
_EMA: Final = "ema"
_RANKS: Final = "ranks"
# Settings of the optimizer that are not taken from a checkpoint: constants that a learning-rate rule scales, besides
# the learning rate, which is set in every step, and the kernels, which depend on the device.
_ATTEMPT_SETTINGS: Final = frozenset({"betas", "eps", "foreach", "fused"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingProgress:
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
        batch_starts: where global batches of each size begin, in their order; empty if all have the same size.
    """

    step: int = 0
    epoch: int = 0
    samples_seen: int = 0
    skipped_steps: int = 0
    wall_s: float = 0.0
    last_loss: float | None = None
    evaluation: EvaluationResult | None = None
    evaluated_step: int | None = None
    batch_starts: tuple[BatchStart, ...] = ()

    def as_document(self) -> dict[str, Any]:
        """Return the progress as a JSON document; non-finite numbers become null."""
        document = asdict(self)
        if not self.batch_starts:
            del document["batch_starts"]
        if self.evaluation is not None:
            document["evaluation"] = {
                name: value if math.isfinite(value) else None for name, value in self.evaluation.as_record().items()
            }
        return document

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> TrainingProgress:
        """Return the progress that ``as_document`` wrote."""
        fields = dict(document)
        if document["evaluation"] is not None:
            numbers: dict[str, Any] = {}
            for name, value in document["evaluation"].items():
                numbers[name] = math.nan if value is None else value
            fields["evaluation"] = EvaluationResult(**numbers)
        fields["batch_starts"] = tuple(BatchStart(**start) for start in document.get("batch_starts", ()))
        return cls(**fields)


class _OptimizerState:
    """The optimizer and the gradient scaler of a replica, as one object of a checkpoint.

    The constants that follow the global batch, and the kernels, are those of this attempt: a resumption may have
    changed the batch or the device.
    """

    def __init__(self, replica: Replica) -> None:
        self._optimizer = replica.optimizer
        self._scaler = replica.scaler

    def state_dict(self) -> dict[str, Any]:
        """Return both states."""
        return {"optimizer": self._optimizer.state_dict(), "scaler": self._scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load both states; a checkpoint of another precision has no state for the scaler."""
        optimizer_state = state["optimizer"]
        groups = []
        for saved_group, group in zip(optimizer_state["param_groups"], self._optimizer.param_groups, strict=True):
            attempt_settings = {name: group[name] for name in _ATTEMPT_SETTINGS & group.keys()}
            groups.append({**saved_group, **attempt_settings})
        # Changed before the load: where the step counts of Adam belong depends on the kernels.
        self._optimizer.load_state_dict({**optimizer_state, "param_groups": groups})
        if self._scaler.is_enabled() and state["scaler"]:
            self._scaler.load_state_dict(state["scaler"])


class _RankStates:
    """State that differs between ranks, as one object of a checkpoint: buffers, and the samples that weight them.

    A run that is resumed with the same number of ranks restores the state of each rank. Otherwise all ranks have the
    merged buffers of the model, with equal numbers of samples.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._gathered: dict[str, Any] = {}

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Keep the states of all ranks on rank 0 within the block; a collective."""
        samples = gather_samples(self._replica.samples, self._replica.placeholder.device)
        buffers = gather_differing(self._replica.models)
        if buffers:
            self._gathered = {"world_size": dist.get_world_size(), "samples": samples, "buffers": buffers}
        try:
            yield
        finally:
            self._gathered = {}

    def state_dict(self) -> dict[str, Any]:
        """Return what was gathered; empty if no buffer differs."""
        return self._gathered

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take this rank's own buffers and number of samples, if there were as many ranks."""
        if state["world_size"] == dist.get_world_size():
            take_rows(self._replica.models, state["buffers"])
            self._replica.samples = state["samples"][dist.get_rank()]


def make_checkpointer(
    context: TrainContext, replica: Replica, contract: Mapping[str, Any], information: Mapping[str, Any]
) -> Checkpointer:
    """Return the checkpointer of a replica.

    The contract must be the same in later attempts; the information may differ in them.
    """
    rank_states = _RankStates(replica)
    objects: dict[str, Stateful] = {"model": replica.model, "optimizer": _OptimizerState(replica)}
    if replica.ema is not None:
        objects[_EMA] = replica.ema.model
    objects[_RANKS] = rank_states

    @contextmanager
    def save_context(step: int) -> Iterator[None]:
        _refuse_nonfinite(replica, step)
        with rank_states.gathered(), replica.merged():
            yield

    return Checkpointer(
        context.run.path,
        objects,
        keep=context.spec.checkpoint.keep,
        best=context.spec.checkpoint.best,
        contract=contract,
        settings=SaveSettings(
            information=information,
            described_as="train.model and train.optimizer",
            optional=(_RANKS,),
            save_context=save_context,
            broadcast_save_errors=False,
            now=context.now,
            monotonic=context.monotonic,
            print_line=context.print_on_rank_0,
            reads_environment=False,
        ),
    )


def restore(
    checkpointer: Checkpointer,
    checkpoint: Checkpoint | None,
    attempt: int,
    replica: Replica,
    batch_starts: tuple[BatchStart, ...],
) -> TrainingProgress:
    """Load a verified checkpoint into this rank's replica, and return the progress of the training at the save.

    All ranks have agreed on the checkpoint; None = start from the beginning. The attempt owns the run, and its global
    batches of each size begin at ``batch_starts``.

    Raises:
        ResumeError: the checkpoint is of another model or optimizer.
        InvalidCheckpointError: the checkpoint can no longer be read.
    """
    progress = TrainingProgress()
    if checkpoint is not None:
        _refuse_changed_ema(checkpoint, replica)
        progress = progress_of(checkpoint)
        replica.samples = progress.samples_seen // dist.get_world_size()
    checkpointer.restore_from(checkpoint, attempt)
    if batch_starts and batch_starts[-1].step == progress.step:
        # Batches of another size may begin in the next epoch.
        progress = replace(progress, epoch=batch_starts[-1].epoch)
    return replace(progress, batch_starts=batch_starts)


def progress_of(checkpoint: Checkpoint) -> TrainingProgress:
    """Return the progress of a training from a checkpoint's manifest.

    Raises:
        InvalidCheckpointError: the manifest is that of another program, or holds two different steps.
    """
    manifest = checkpoint.manifest
    try:
        progress = TrainingProgress.from_document(manifest.progress)
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


def _refuse_changed_ema(checkpoint: Checkpoint, replica: Replica) -> None:
    was_averaged = f"{_EMA}.pt" in checkpoint.manifest.files
    is_averaged = replica.ema is not None
    if was_averaged == is_averaged:
        return
    saved_how = "with" if was_averaged else "without"
    decay = "given" if is_averaged else "null"
    raise ResumeError(
        f"{checkpoint.path.name} was saved {saved_how} averaged weights, and now train.ema_decay "
        f"is {decay}, so that the average cannot be continued; restore the old value, or submit "
        "a new run"
    )


def _refuse_nonfinite(replica: Replica, step: int) -> None:
    """Raise on all ranks if a parameter is not finite; parameters are equal on all ranks."""
    names = [name for name, _ in replica.model.named_parameters()]
    are_finite = [torch.isfinite(parameter).all() for parameter in replica.model.parameters()]
    # One transfer from the device, not one per parameter.
    for name, is_finite in zip(names, torch.stack(are_finite).tolist(), strict=True):
        if not is_finite:
            raise NonFiniteError(
                f"after step {step} {name} is not finite, so the state is not saved; lower the learning "
                "rate, clip the gradient with train.clip_grad_norm, or use a wider precision",
                step=step,
            )
