"""Where a run stands when an attempt begins: rank 0 looks, every rank verifies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hpcddp.run import checkpoints
from hpcddp.run.checkpoints import Checkpoint, NoCheckpointError
from hpcddp.run.directory import RunDirectory
from hpcddp.run.events import read_events
from hpcddp.run.files import read_json
from hpcddp.run.lease import raise_if_fenced
from hpcddp.run.manifest import checkpoint_name
from hpcddp.run.publish import sweep
from hpcddp.train import callers


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


def agree_on_start(run: RunDirectory, attempt: int, *, tell: Callable[[str], None]) -> Found:
    """Let rank 0 look where the run stands, and every rank verify the same checkpoint by itself.

    Args:
        run: the run.
        attempt: the attempt that begins; it owns the run.
        tell: is told, on rank 0, about each checkpoint that is passed over.

    Raises:
        NoCheckpointError: there should be a checkpoint, and none is valid.
        FencedError: another attempt owns the run; on rank 0.
        InvalidCheckpointError: this rank sees another content than rank 0 does.
    """
    error: NoCheckpointError | None = None
    verdict, step = _FRESH, 0
    checkpoint = None
    if callers.rank() == 0:
        try:
            verdict, checkpoint = _look(run, attempt, tell)
            step = checkpoint.manifest.step if checkpoint else 0
        except NoCheckpointError as caught:
            verdict, error = _NOTHING_VALID, caught
    verdict, step = callers.broadcast_numbers([verdict, step])
    if verdict == _NOTHING_VALID:
        raise error or NoCheckpointError(f"rank 0 finds no valid checkpoint in {run.checkpoints}")
    if verdict == _RESUME and checkpoint is None:
        checkpoint = checkpoints.verify(run.checkpoints / checkpoint_name(step))
    return Found(verdict == _FINISHED, checkpoint)


def _look(run: RunDirectory, attempt: int, tell: Callable[[str], None]) -> tuple[int, Checkpoint | None]:
    result = read_json(run.result)
    if result is not None and result.get("status") == "finished":
        return _FINISHED, None
    raise_if_fenced(run, attempt)
    sweep(run.checkpoints, attempt=attempt)
    saved_before = any(event["event"] == "save" for event in read_events(run.events))
    checkpoint = checkpoints.newest_valid(run.checkpoints, expected=saved_before, warn=tell)
    if checkpoint is None:
        return _FRESH, None
    checkpoints.set_aside_newer(run.checkpoints, checkpoint.manifest.step)
    return _RESUME, checkpoint
