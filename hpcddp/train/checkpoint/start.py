"""Agree at the start of an attempt on the checkpoint to resume from: rank 0 chooses it, every rank verifies it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hpcddp.run import checkpoints
from hpcddp.run.checkpoints import Checkpoint, NoCheckpointError, checkpoint_name
from hpcddp.run.directory import RunDirectory
from hpcddp.run.events import read_events
from hpcddp.run.ownership import raise_if_fenced
from hpcddp.run.publish import sweep
from hpcddp.run.result import has_finished
from hpcddp.train import callers


@dataclass(frozen=True, slots=True)
class Found:
    """The state of a run at the start of an attempt.

    Args:
        finished: whether the run has finished already.
        checkpoint: the checkpoint to resume from; None = start from the beginning.
    """

    finished: bool
    checkpoint: Checkpoint | None


_FRESH, _RESUME, _FINISHED, _NOTHING_VALID = range(4)


def _nothing(_: Checkpoint) -> None:
    pass


def agree_on_start(
    run: RunDirectory,
    attempt: int,
    *,
    tell: Callable[[str], None],
    check: Callable[[Checkpoint], object] = _nothing,
) -> Found:
    """Let rank 0 choose the newest valid checkpoint, and every rank verify it.

    Args:
        run: the run.
        attempt: the attempt that begins; it owns the run.
        tell: writes, on rank 0, a warning for each checkpoint that is skipped.
        check: checks, on rank 0, a complete checkpoint; raises InvalidCheckpointError to skip it.

    Raises:
        NoCheckpointError: checkpoints were saved before, and none is valid.
        FencedError: another attempt owns the run; on rank 0.
        InvalidCheckpointError: this rank reads other content than rank 0.
    """
    error: NoCheckpointError | None = None
    verdict, step = _FRESH, 0
    checkpoint = None
    if callers.rank() == 0:
        try:
            verdict, checkpoint = _choose(run, attempt, tell, check)
            step = checkpoint.manifest.step if checkpoint else 0
        except NoCheckpointError as caught:
            verdict, error = _NOTHING_VALID, caught
    verdict, step = callers.broadcast_numbers([verdict, step])
    if verdict == _NOTHING_VALID:
        raise error or NoCheckpointError(f"rank 0 finds no valid checkpoint in {run.checkpoints}")
    if verdict == _RESUME and checkpoint is None:
        checkpoint = checkpoints.verify(run.checkpoints / checkpoint_name(step))
    return Found(verdict == _FINISHED, checkpoint)


def _choose(
    run: RunDirectory, attempt: int, tell: Callable[[str], None], check: Callable[[Checkpoint], object]
) -> tuple[int, Checkpoint | None]:
    if has_finished(run):
        return _FINISHED, None
    raise_if_fenced(run, attempt)
    sweep(run.checkpoints, attempt=attempt)
    saved_before = any(event.kind == "save" for event in read_events(run.events))
    checkpoint = checkpoints.newest_valid(run.checkpoints, expected=saved_before, warn=tell, check=check)
    if checkpoint is None:
        return _FRESH, None
    checkpoints.set_aside_newer(run.checkpoints, checkpoint.manifest.step)
    return _RESUME, checkpoint
