"""What is there to go on from: every checkpoint of a run, verified."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpcddp.run.checkpoints import InvalidCheckpointError, list_checkpoints, verify
from hpcddp.run.manifest import step_of


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState:
    """One checkpoint on disk.

    Args:
        path: its directory.
        step: optimizer steps done, as its name says.
        size: bytes of its files.
        time: when it was written, in seconds since the epoch.
        attempt: the attempt that wrote it; None where its manifest cannot be read.
        damage: why it is not valid; None = it is.
        resumes: whether a resume would take it: the newest valid one.
    """

    path: Path
    step: int
    size: int
    time: float
    attempt: int | None
    damage: str | None
    resumes: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return the document that ``--json`` prints."""
        return {
            "step": self.step,
            "size": self.size,
            "time": self.time,
            "attempt": self.attempt,
            "valid": self.damage is None,
            "damage": self.damage,
            "resumes": self.resumes,
            "path": str(self.path),
        }


def survey(directory: Path) -> list[CheckpointState]:
    """Return what is known of every checkpoint in a folder, the newest first; reads all of their files.

    Args:
        directory: the folder of checkpoints; need not exist.
    """
    states = [_look(path) for path in list_checkpoints(directory)]
    newest = next((state for state in states if state.damage is None), None)
    return [replace(state, resumes=state is newest) for state in states]


def _look(path: Path) -> CheckpointState:
    attempt, written, damage = None, None, None
    try:
        manifest = verify(path).manifest
        attempt, written = manifest.attempt, manifest.time
    except (InvalidCheckpointError, OSError) as error:
        damage = str(error)
    sizes, times = zip(*_files(path), strict=True)
    return CheckpointState(
        path=path,
        step=step_of(path) or 0,
        size=sum(sizes),
        time=max(times) if written is None else written,
        attempt=attempt,
        damage=damage,
    )


def _files(path: Path) -> Iterator[tuple[int, float]]:
    """Yield the sizes and times of a checkpoint's files; the directory counts as empty."""
    yield 0, path.stat().st_mtime
    for file in path.iterdir() if path.is_dir() else ():
        status = file.stat()
        yield status.st_size, status.st_mtime
