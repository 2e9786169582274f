"""Saving and loading a training: what goes into a checkpoint, who writes it, and what it must agree with."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, Final

import torch
import torch.distributed as dist

from hpcddp.batch.order import CONTRACT_VERSION
from hpcddp.run import checkpoints
from hpcddp.run.checkpoints import Checkpoint, FencedError, Manifest, NoCheckpointError
from hpcddp.run.events import EventKind, append_event, read_events
from hpcddp.run.files import read_json
from hpcddp.spec.job import JobSpec
from hpcddp.train.context import TrainContext
from hpcddp.train.data.images import Data
from hpcddp.train.errors import NonFiniteError, ResumeError, SaveError
from hpcddp.train.merging import gather_differing, gather_samples, take_rows
from hpcddp.train.progress import Progress
from hpcddp.train.replica import Replica

MODEL_FILE: Final = "model.pt"
OPTIMIZER_FILE: Final = "optimizer.pt"
EMA_FILE: Final = "ema.pt"
RANKS_FILE: Final = "ranks.pt"
_FAILURES_ALLOWED: Final = 2

_LABELS: Final = {
    "version": "the version of the batch contract",
    "seed": "train.seed",
    "samples": "the number of training samples",
    "unit": "batch.unit",
    "fingerprint": "the fingerprint of the training data",
    "global_batch_size": "batch.global_batch_size",
    "tail": "batch.tail",
    "order": "batch.order",
}
# What every training did before it became a choice.
_BEFORE: Final = {"unit": "sample"}


def contract_of(spec: JobSpec, data: Data, seed: int) -> dict[str, Any]:
    """Return what every attempt of a run must agree with: it decides which samples each step sees."""
    return {
        "version": CONTRACT_VERSION,
        "seed": seed,
        "samples": len(data.train),
        "unit": spec.batch.unit,
        "fingerprint": data.fingerprint,
        "global_batch_size": spec.batch.global_batch_size,
        "tail": spec.batch.tail,
        "order": spec.batch.order,
    }


def refuse_another_contract(checkpoint: Checkpoint, contract: Mapping[str, Any]) -> None:
    """Refuse to go on from a checkpoint of a training that sees other batches.

    Raises:
        ResumeError: names what differs, and both values.
    """
    for name, here in contract.items():
        saved = checkpoint.manifest.contract.get(name, _BEFORE.get(name))
        if saved != here:
            raise ResumeError(
                f"{checkpoint.path.name} was saved with {_LABELS[name]} {saved}, and now it is {here}, so that the "
                "steps to come would not see the samples that are left; bring the old one back, or submit a new run"
            )


def raise_if_fenced(context: TrainContext) -> None:
    """Refuse to write for an attempt that is no longer the newest.

    Raises:
        FencedError: another attempt owns the run.
    """
    newest = context.run.newest_attempt()
    if newest is not None and newest != context.attempt:
        raise FencedError(
            f"attempt {newest} owns the run {context.run.run_id}, so attempt {context.attempt} must not "
            "write; it ends here"
        )


@dataclass(frozen=True, slots=True)
class Found:
    """What an attempt begins with.

    Args:
        finished: whether the run has finished already.
        checkpoint: what to go on from; None = from the beginning.
    """

    finished: bool
    checkpoint: Checkpoint | None


_FRESH, _RESUME, _FINISHED, _NOTHING_VALID = range(4)


def find_start(context: TrainContext) -> Found:
    """Let rank 0 look where the run stands, and every rank verify the same checkpoint by itself.

    Raises:
        NoCheckpointError: there should be a checkpoint, and none is valid.
        InvalidCheckpointError: this rank sees another content than rank 0 does.
    """
    error: NoCheckpointError | None = None
    verdict, step = _FRESH, 0
    checkpoint = None
    if context.is_main:
        try:
            verdict, checkpoint = _look(context)
            step = checkpoint.manifest.step if checkpoint else 0
        except NoCheckpointError as caught:
            verdict, error = _NOTHING_VALID, caught
    told = torch.tensor([verdict, step], device=context.device)
    dist.broadcast(told, src=0)
    verdict, step = told.tolist()
    if verdict == _NOTHING_VALID:
        raise error or NoCheckpointError(f"rank 0 finds no valid checkpoint in {context.run.checkpoints}")
    if verdict == _RESUME and checkpoint is None:
        checkpoint = checkpoints.verify(context.run.checkpoints / checkpoints.checkpoint_name(step))
    return Found(verdict == _FINISHED, checkpoint)


def _look(context: TrainContext) -> tuple[int, Checkpoint | None]:
    result = read_json(context.run.result)
    if result is not None and result.get("status") == "finished":
        return _FINISHED, None
    raise_if_fenced(context)
    saved_before = any(event["event"] == "save" for event in read_events(context.run.events))
    checkpoint = checkpoints.newest_valid(context.run.checkpoints, expected=saved_before, warn=context.tell)
    if checkpoint is None:
        return _FRESH, None
    checkpoints.set_aside_newer(context.run.checkpoints, checkpoint.manifest.step)
    return _RESUME, checkpoint


def restore(checkpoint: Checkpoint, replica: Replica) -> Progress:
    """Load a verified checkpoint into this rank's replica.

    With as many ranks as saved it, each gets back the buffers that were its own, and by how many samples they count;
    with other numbers, all get the merged ones, which count alike.

    Returns:
        How far the training was.

    Raises:
        ResumeError: it is of another model or optimizer.
    """
    _refuse_other_average(checkpoint, replica)
    progress = Progress.from_document(checkpoint.manifest.progress)
    replica.samples = progress.samples_seen // dist.get_world_size()
    try:
        replica.model.load_state_dict(_load(checkpoint, MODEL_FILE))
        if replica.ema is not None:
            replica.ema.model.load_state_dict(_load(checkpoint, EMA_FILE))
        if RANKS_FILE in checkpoint.manifest.files:
            saved = _load(checkpoint, RANKS_FILE)
            if saved["world_size"] == dist.get_world_size():
                take_rows(replica.models, saved["buffers"])
                # Checkpoints of earlier versions do not count.
                replica.samples = saved.get("samples", {dist.get_rank(): replica.samples})[dist.get_rank()]
        training = _load(checkpoint, OPTIMIZER_FILE)
        replica.optimizer.load_state_dict(training["optimizer"])
        if replica.scaler.is_enabled() and training["scaler"]:
            replica.scaler.load_state_dict(training["scaler"])
    except pickle.UnpicklingError as error:
        raise ResumeError(
            f"{checkpoint.path.name} holds objects that could run code, and only tensors, numbers, texts and their "
            "containers are loaded; let get_extra_state of the model return those, and submit a new run"
        ) from error
    except (RuntimeError, ValueError, KeyError) as error:
        raise ResumeError(
            f"{checkpoint.path.name} is of another model or optimizer than train.model and train.optimizer say "
            f"({str(error).strip().splitlines()[-1].strip()}); bring the old ones back, or submit a new run"
        ) from error
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


def _load(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(checkpoint.path / name, map_location="cpu", weights_only=True)
    return state


class Saver:
    """Saves the training: all ranks take part, rank 0 writes.

    Args:
        context: who this rank is, and where the run lies.
        contract: what later attempts must agree with.
        information: what they need not agree with.
    """

    def __init__(self, context: TrainContext, contract: Mapping[str, Any], information: Mapping[str, Any]) -> None:
        self._context, self._contract, self._information = context, contract, information
        self._failures = 0

    def save(self, replica: Replica, progress: Progress, reason: str) -> None:
        """Save the state after ``progress.step`` steps.

        Args:
            replica: this rank's replica.
            progress: how far it is.
            reason: why now, in a few words, for the event log.

        Raises:
            NonFiniteError: a parameter is not finite; nothing is written.
            FencedError: another attempt owns the run.
            SaveError: the third save in a row failed.
        """
        _refuse_nonfinite(replica, progress.step)
        own = {
            "world_size": self._context.world_size,
            "samples": gather_samples(replica.samples, self._context.device),
            "buffers": gather_differing(replica.models),
        }
        with replica.merged():
            if self._context.is_main:
                self._write(replica, progress, own, reason)

    def _write(self, replica: Replica, progress: Progress, own: Mapping[str, Any], reason: str) -> None:
        try:
            published = self._publish(replica, progress, own)
        except OSError as error:
            self._count_failure(progress.step, error)
            return
        self._failures = 0
        self._event("save", progress.step, reason)
        self._prune(published)

    def _publish(self, replica: Replica, progress: Progress, own: Mapping[str, Any]) -> Checkpoint:
        manifest = Manifest(
            step=progress.step,
            attempt=self._context.attempt,
            time=self._context.now(),
            contract=self._contract,
            progress=progress.as_document(),
            information=self._information,
            files={},
        )
        training = {"optimizer": replica.optimizer.state_dict(), "scaler": replica.scaler.state_dict()}
        files: dict[str, Mapping[str, Any]] = {MODEL_FILE: replica.model.state_dict(), OPTIMIZER_FILE: training}
        if replica.ema is not None:
            files[EMA_FILE] = replica.ema.model.state_dict()
        if own["buffers"]:
            files[RANKS_FILE] = own
        writers = {name: partial(_dump, state) for name, state in files.items()}
        directory = self._context.run.checkpoints
        return checkpoints.publish(directory, manifest, writers, may_publish=lambda: raise_if_fenced(self._context))

    def _count_failure(self, step: int, error: OSError) -> None:
        self._failures += 1
        sentence = f"saving after step {step} failed ({error})"
        if self._failures > _FAILURES_ALLOWED:
            raise SaveError(
                f"{sentence}, for the {self._failures}rd time in a row; make room or make "
                f"{self._context.run.checkpoints} writable"
            ) from error
        self._context.tell(f"warning: {sentence}; the training goes on, the checkpoints before it are kept")

    def _prune(self, newest: Checkpoint) -> None:
        keep, directory = self._context.spec.checkpoint.keep, self._context.run.checkpoints
        try:
            checkpoints.prune(directory, keep=keep, newest=newest.path, attempt=self._context.attempt)
        except OSError as error:
            self._context.tell(f"warning: old checkpoints in {directory} cannot be removed ({error})")

    def _event(self, kind: EventKind, step: int, reason: str) -> None:
        context = self._context
        try:
            append_event(
                context.run.events, kind=kind, time=context.now(), attempt=context.attempt, step=step, reason=reason
            )
        except OSError as error:
            context.tell(f"warning: {context.run.events} cannot be written ({error}); the checkpoint is whole")


def _dump(state: Mapping[str, Any], stream: IO[bytes]) -> None:
    torch.save(state, stream)


def _refuse_nonfinite(replica: Replica, step: int) -> None:
    """Refuse to keep a ruined training: parameters are the same on all ranks, so all of them come to the same end."""
    for name, parameter in replica.model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise NonFiniteError(
                f"after step {step} {name} is not finite, so that there is nothing worth saving; lower the learning "
                "rate, clip the gradient with train.clip_grad_norm, or use a wider precision",
                step=step,
            )
