"""Where a run stands when an attempt begins: rank 0 looks, every rank verifies."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from hpcddp.run import checkpoints
from hpcddp.run.checkpoints import Checkpoint, NoCheckpointError
from hpcddp.run.events import read_events
from hpcddp.run.files import read_json
from hpcddp.run.lease import raise_if_fenced
from hpcddp.run.manifest import checkpoint_name
from hpcddp.run.publish import sweep
from hpcddp.train.context import TrainContext


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
        checkpoint = checkpoints.verify(context.run.checkpoints / checkpoint_name(step))
    return Found(verdict == _FINISHED, checkpoint)


def _look(context: TrainContext) -> tuple[int, Checkpoint | None]:
    result = read_json(context.run.result)
    if result is not None and result.get("status") == "finished":
        return _FINISHED, None
    raise_if_fenced(context.run, context.attempt)
    sweep(context.run.checkpoints, attempt=context.attempt)
    saved_before = any(event["event"] == "save" for event in read_events(context.run.events))
    checkpoint = checkpoints.newest_valid(context.run.checkpoints, expected=saved_before, warn=context.tell)
    if checkpoint is None:
        return _FRESH, None
    checkpoints.set_aside_newer(context.run.checkpoints, checkpoint.manifest.step)
    return _RESUME, checkpoint
