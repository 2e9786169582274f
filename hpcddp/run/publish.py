"""Writing checkpoints so that they are there as a whole or not at all.

A checkpoint is written under a temporary name in the same directory: its files, each synced, then its manifest with
their sizes and sha256, then a rename that fails if the name exists. A process that is killed at any point of this
leaves the checkpoints before it as they were.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Final

from hpcddp.run.checkpoints import (
    BEST,
    LATEST,
    MANIFEST,
    Checkpoint,
    Manifest,
    Writer,
    best_checkpoint,
    checkpoint_name,
    left_by,
    list_checkpoints,
    set_aside,
    step_of,
    temporary_name,
    valid_or_none,
    write_hashed,
)
from hpcddp.run.evaluations import Mode, best_of
from hpcddp.run.files import read_tail, sync_directory, write_text
from hpcddp.stop import faults

_LONGEST_NAME: Final = 64


def publish(
    directory: Path, manifest: Manifest, writers: Mapping[str, Writer], *, may_publish: Callable[[], None]
) -> Checkpoint:
    """Write a checkpoint so that it is there as a whole or not at all.

    Args:
        directory: the folder of checkpoints; made if it alone is missing. Where the run is gone too, its disk is.
        manifest: what it holds; its ``files`` are filled in here.
        writers: one function per file name.
        may_publish: called just before the name appears; raises if another attempt owns the run.

    Returns:
        The checkpoint. If a valid one of the same step is there already, that one.

    Raises:
        OSError: the disk is full, read-only or missing; nothing is left of it, where possible.
        FencedError: from ``may_publish``.
    """
    faults.inject("save.begin", step=manifest.step)
    directory.mkdir(mode=0o700, exist_ok=True)
    temporary = directory / temporary_name(manifest.step, manifest.attempt)
    try:
        complete = _write(temporary, manifest, writers)
        may_publish()
        return _give_name(temporary, directory / checkpoint_name(manifest.step), complete)
    except OSError:
        # The attempt that fenced this one has taken the temporary directory away: that is the cause, not the disk.
        may_publish()
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write(temporary: Path, manifest: Manifest, writers: Mapping[str, Writer]) -> Manifest:
    temporary.mkdir(mode=0o700)
    files = {
        name: write_hashed(temporary / name, _with_fault(writer, manifest.step)) for name, writer in writers.items()
    }
    faults.inject("save.manifest", step=manifest.step)
    complete = replace(manifest, files=files)
    write_text(temporary / MANIFEST, complete.to_text())
    return complete


def _with_fault(writer: Writer, step: int) -> Writer:
    def write(stream: IO[bytes]) -> None:
        writer(stream)
        faults.inject("save.file", step=step)

    return write


def _give_name(temporary: Path, target: Path, manifest: Manifest) -> Checkpoint:
    faults.inject("save.rename", step=manifest.step)
    if target.exists():
        present = valid_or_none(target)
        if present is not None:
            return present
    set_aside(target)
    # rename(2) replaces no directory that holds something.
    temporary.rename(target)
    sync_directory(target.parent)
    return Checkpoint(target, manifest)


def advance_latest(directory: Path, step: int, *, may_publish: Callable[[], None]) -> None:
    """Let ``latest`` name the checkpoint of a step, unless it names a later one that is there. No reader relies on it.

    Raises:
        OSError: the disk cannot be written; the checkpoint is whole nevertheless.
        FencedError: from ``may_publish``.
    """
    faults.inject("save.latest", step=step)
    path = directory / LATEST
    named_step = None
    if path.is_file():
        named_step = step_of(Path(read_tail(path, _LONGEST_NAME).strip()))
    # A damaged one may name a step that was never saved, and would stay for ever.
    if named_step is None or named_step < step or not (directory / checkpoint_name(named_step)).exists():
        # A stale attempt that has just been held up must not set back what another one wrote meanwhile.
        may_publish()
        write_text(path, f"{checkpoint_name(step)}\n")


def point_best(directory: Path, values: Mapping[int, float], mode: Mode, *, may_publish: Callable[[], None]) -> None:
    """Let ``best`` name the checkpoint with the best value, of those that are there, in one step.

    It follows from the values and the directory alone, so that nothing is lost if the process is killed before or
    within it: the next call does the same.

    Args:
        directory: the folder of checkpoints.
        values: of the metric, by step; ``best`` stays as it is if no checkpoint has one.
        mode: whether the largest or the smallest value is the best.
        may_publish: called just before ``best`` is replaced; raises if another attempt owns the run.

    Raises:
        OSError: the disk cannot be written.
        FencedError: from ``may_publish``.
    """
    there = (step_of(path) for path in list_checkpoints(directory))
    values_of_checkpoints = {step: values[step] for step in there if step is not None and step in values}
    if not values_of_checkpoints:
        return
    best = directory / BEST
    best_step = best_of(values_of_checkpoints, mode)
    target = directory / checkpoint_name(best_step)
    if best_checkpoint(directory) == target:
        return
    faults.inject("best", step=best_step)
    temporary = directory / f".{BEST}.{secrets.token_hex(4)}"
    temporary.symlink_to(target.name)
    try:
        may_publish()
        if best.is_dir() and not best.is_symlink():
            # A copy of the run that followed the link.
            set_aside(best)
        temporary.replace(best)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(directory)


def prune(directory: Path, *, keep: int, newest: Path, attempt: int) -> None:
    """Remove old checkpoints, but for the best one, and what earlier attempts left half written.

    Args:
        directory: the folder of checkpoints.
        keep: how many stay, >= 2.
        newest: the newest valid one; it stays in any case.
        attempt: the attempt that owns the run.

    Raises:
        OSError: the disk cannot be written.
    """
    faults.inject("save.prune", step=step_of(newest))
    kept = (newest, best_checkpoint(directory))
    for path in list_checkpoints(directory)[keep:]:
        if path not in kept:
            _remove(path)
    remove_unfinished(directory, attempt=attempt)


def _remove(path: Path) -> None:
    """Remove a checkpoint, under a temporary name, so that no reader finds a part of it."""
    temporary = path.with_name(temporary_name(step_of(path) or 0, 0))
    path.rename(temporary)
    shutil.rmtree(temporary)


def remove_unfinished(directory: Path, *, attempt: int) -> None:
    """Remove what earlier attempts left half written, or are still writing. Call it while this one writes nothing.

    A new attempt does so before it looks for a checkpoint. An old one that still runs, between its last check of the
    ownership and its rename, then has nothing left to rename: what it publishes is there before the look, or never.

    Raises:
        OSError: the directory cannot be read, or something in it cannot be renamed.
    """
    if not directory.is_dir():
        return
    for path in directory.iterdir():
        if path.name.startswith((f".{LATEST}.", f".{BEST}.")):
            path.unlink(missing_ok=True)
        by = left_by(path)
        if by is not None and by < attempt:
            # The rename is what counts, and cannot be half done. The other one may be faster at removing it.
            with suppress(FileNotFoundError):
                temporary = path.rename(path.with_name(temporary_name(0, 0)))
                shutil.rmtree(temporary, ignore_errors=True)
