"""Loading a verified checkpoint into a replica."""

from __future__ import annotations

import pickle
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

    With as many ranks as saved it, each gets back the buffers that were its own; with other numbers, all get the merged
    ones.

    Returns:
        How far the training was.

    Raises:
        ResumeError: it is of another model or optimizer.
    """
    _refuse_other_average(checkpoint, replica)
    try:
        replica.model.load_state_dict(_load(checkpoint, MODEL_FILE))
        if replica.ema is not None:
            replica.ema.model.load_state_dict(_load(checkpoint, EMA_FILE))
        if RANKS_FILE in checkpoint.manifest.files:
            saved = _load(checkpoint, RANKS_FILE)
            if saved["world_size"] == dist.get_world_size():
                take_rows(replica.models, saved["buffers"])
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
    return Progress.from_document(checkpoint.manifest.progress)


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
