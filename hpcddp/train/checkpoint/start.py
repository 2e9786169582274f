"""Find the checkpoint to resume from at the start of an attempt, and load its files.

Rank 0 chooses the checkpoint, and every rank verifies it.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch

from hpcddp.run import checkpoints
from hpcddp.run.checkpoints import Checkpoint, NoCheckpointError, checkpoint_name, open_file
from hpcddp.run.directory import RunDirectory
from hpcddp.run.events import read_events
from hpcddp.run.files import TAIL_BYTES
from hpcddp.run.job_records import read_start
from hpcddp.run.metrics import read_metrics
from hpcddp.run.ownership import raise_if_fenced
from hpcddp.run.publish import remove_unfinished
from hpcddp.run.result import has_finished
from hpcddp.train import distributed
from hpcddp.train.errors import ResumeError

_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})


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
    print_line: Callable[[str], None],
    check: Callable[[Checkpoint], object] = _nothing,
) -> Found:
    """Let rank 0 choose the newest valid checkpoint, and every rank verify it.

    Args:
        attempt: the attempt that begins; it owns the run.
        print_line: writes, on rank 0, a warning for each checkpoint that is skipped.
        check: checks, on rank 0, a complete checkpoint; raises InvalidCheckpointError to skip it.

    Raises:
        NoCheckpointError: checkpoints were saved before, and none is valid.
        FencedError: another attempt owns the run; on rank 0.
        InvalidCheckpointError: this rank reads other content than rank 0.
    """
    error: NoCheckpointError | None = None
    outcome = _FRESH
    step = 0
    checkpoint = None
    if distributed.rank() == 0:
        try:
            outcome, checkpoint = _choose(run, attempt, print_line, check)
            step = checkpoint.manifest.step if checkpoint else 0
        except NoCheckpointError as caught:
            outcome = _NOTHING_VALID
            error = caught
    outcome, step = distributed.broadcast_numbers([outcome, step])
    if outcome == _NOTHING_VALID:
        raise error or NoCheckpointError(f"rank 0 finds no valid checkpoint in {run.checkpoints}")
    if outcome == _RESUME and checkpoint is None:
        checkpoint = checkpoints.verify(run.checkpoints / checkpoint_name(step))
    return Found(outcome == _FINISHED, checkpoint)


def _choose(
    run: RunDirectory, attempt: int, print_line: Callable[[str], None], check: Callable[[Checkpoint], object]
) -> tuple[int, Checkpoint | None]:
    if has_finished(run):
        return _FINISHED, None
    raise_if_fenced(run, attempt)
    remove_unfinished(run.checkpoints, attempt=attempt)
    events = read_events(run.events)
    saved_before = any(event.kind == "save" for event in events)
    # Steps were made, and no event of an earlier attempt is left: a save may have been in the lost part of the log.
    lost = all(event.attempt >= attempt for event in events) and _has_steps_before(run, attempt)
    checkpoint = checkpoints.newest_valid(run.checkpoints, expected=saved_before or lost, warn=print_line, check=check)
    if checkpoint is None:
        return _FRESH, None
    checkpoints.set_aside_newer(run.checkpoints, checkpoint.manifest.step)
    return _RESUME, checkpoint


def _has_steps_before(run: RunDirectory, attempt: int) -> bool:
    """Return whether metrics are older than the attempt: code of the user's own may log before it restores."""
    start = read_start(run.attempt(attempt))
    began = math.inf if start is None else start.time
    lines = read_metrics(run.metrics, TAIL_BYTES).records
    return any(line.time is not None and line.time < began for line in lines)


def refuse_another_contract(
    checkpoint: Checkpoint, contract: Mapping[str, Any], labels: Mapping[str, str] = _NOTHING
) -> None:
    """Refuse to resume from a checkpoint with another contract.

    Args:
        checkpoint: the checkpoint to resume from.
        contract: the contract of this attempt.
        labels: the entries' names in the error message.

    Raises:
        ResumeError: names the first entry that differs, with both values.
    """
    for name, now in contract.items():
        saved = checkpoint.manifest.contract.get(name)
        if saved != now:
            label = labels.get(name, name)
            raise ResumeError(
                f"{checkpoint.path.name} was saved with {label} {saved}, and now it is {now}, so that the "
                "steps to come would not see the samples that are left; restore the old one, or submit a new run"
            )


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
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, FileNotFoundError) as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[-1].strip()
        raise ResumeError(
            f"{checkpoint.path.name} is of another model or optimizer than {who} say ({why}); restore the old ones, or "
            "submit a new run"
        ) from error


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
