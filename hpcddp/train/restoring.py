"""Loading a verified checkpoint into a replica."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from hpcddp.run.checkpoints import Checkpoint
from hpcddp.train.errors import ResumeError
from hpcddp.train.merging import take_rows
from hpcddp.train.progress import Progress
from hpcddp.train.replica import Replica
from hpcddp.train.saving import EMA_FILE, MODEL_FILE, OPTIMIZER_FILE, RANKS_FILE


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
    with loading(checkpoint, "train.model and train.optimizer"):
        replica.model.load_state_dict(load_file(checkpoint, MODEL_FILE))
        if replica.ema is not None:
            replica.ema.model.load_state_dict(load_file(checkpoint, EMA_FILE))
        if RANKS_FILE in checkpoint.manifest.files:
            saved = load_file(checkpoint, RANKS_FILE)
            if saved["world_size"] == dist.get_world_size():
                take_rows(replica.models, saved["buffers"])
                # Checkpoints of earlier versions do not count.
                replica.samples = saved.get("samples", {dist.get_rank(): replica.samples})[dist.get_rank()]
        training = load_file(checkpoint, OPTIMIZER_FILE)
        replica.optimizer.load_state_dict(training["optimizer"])
        if replica.scaler.is_enabled() and training["scaler"]:
            replica.scaler.load_state_dict(training["scaler"])
    return progress


@contextmanager
def loading(checkpoint: Checkpoint, who: str) -> Iterator[None]:
    """Explain what can go wrong with a checkpoint that is whole.

    Args:
        checkpoint: what is being loaded.
        who: what says which model and optimizer there are now.

    Raises:
        ResumeError: it is of another model or optimizer, or holds more than data.
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
    """Return what one file of a verified checkpoint holds; nothing in it is run."""
    state: dict[str, Any] = torch.load(checkpoint.path / name, map_location="cpu", weights_only=True)
    return state
