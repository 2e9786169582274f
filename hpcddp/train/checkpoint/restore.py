"""Load a verified checkpoint into a replica."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from hpcddp.run.checkpoints import MANIFEST, Checkpoint, InvalidCheckpointError, open_file
from hpcddp.train.checkpoint.save import EMA_FILE, MODEL_FILE, OPTIMIZER_FILE, RANKS_FILE
from hpcddp.train.errors import ResumeError
from hpcddp.train.merging import take_rows
from hpcddp.train.progress import Progress
from hpcddp.train.replica import Replica


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


@contextmanager
def loading(checkpoint: Checkpoint, who: str) -> Iterator[None]:
    """Turn errors of loading a valid checkpoint into a ``ResumeError``.

    Args:
        checkpoint: the checkpoint that is loaded.
        who: where the current model and optimizer are set, for the message.

    Raises:
        ResumeError: the checkpoint is of another model or optimizer, or contains objects other than data.
    """
    try:
        yield
    except pickle.UnpicklingError as error:
        raise ResumeError(
            f"{checkpoint.path.name} holds objects that could run code, and only tensors, numbers, texts and their "
            "containers are loaded; let get_extra_state of the model return those, and submit a new run"
        ) from error
    except (RuntimeError, ValueError, KeyError, FileNotFoundError) as error:
        raise ResumeError(
            f"{checkpoint.path.name} is of another model or optimizer than {who} say "
            f"({str(error).strip().splitlines()[-1].strip()}); bring the old ones back, or submit a new run"
        ) from error


def _refuse_other_average(checkpoint: Checkpoint, replica: Replica) -> None:
    saved = EMA_FILE in checkpoint.manifest.files
    if saved == (replica.ema is not None):
        return
    raise ResumeError(
        f"{checkpoint.path.name} was saved {'with' if saved else 'without'} averaged weights, and now train.ema_decay "
        f"is {'null' if saved else 'given'}, so that the average cannot go on; bring the old value back, or submit a "
        "new run"
    )


def load_file(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """Return the content of one file of a verified checkpoint, without running code from it.

    Raises:
        FileNotFoundError: the manifest lists no such file.
        InvalidCheckpointError: the file can no longer be read.
    """
    if name not in checkpoint.manifest.files:
        raise FileNotFoundError(f"it has no {name}")
    with open_file(checkpoint.path / name) as (stream, _):
        state: dict[str, Any] = torch.load(stream, map_location="cpu", weights_only=True)
    return state
