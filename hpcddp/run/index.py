"""The index of this user's runs, with which a run is found from any directory.

One small file for each run that was submitted, in ``~/.local/state/hpcddp/runs/`` (XDG Base Directory Specification).
The index says where runs were; the run directory itself decides whether a run is still there. ``hpcddp status --scan
DIR`` writes the index anew.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from hpcddp.run.directory import RunDirectory
from hpcddp.run.files import exists
from hpcddp.run.record import Record, RecordError, read_record, write_record

_NAME_DIGITS = 32
# <root>/<name>/<run id> is three levels; a root may lie some levels below the directory that is scanned.
_DEEPEST = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexEntry(Record):
    """Where a run was submitted.

    Args:
        run_dir: its directory, an absolute path.
    """

    ADVICE: ClassVar[str] = "remove it; hpcddp status --scan DIR writes the index anew"

    run_dir: str


def index_directory() -> Path | None:
    """Return the directory of the index; None for a user without a home."""
    state = os.environ.get("XDG_STATE_HOME")
    with suppress(RuntimeError):
        return (Path(state) if state else Path.home() / ".local" / "state") / "hpcddp" / "runs"
    return None


def add_to_index(run: RunDirectory) -> None:
    """Write a run into the index, if that can be written: no run depends on it."""
    directory = index_directory()
    if directory is None:
        return
    path = str(run.path.absolute())
    # A run's id may be as long as a file name can be.
    name = hashlib.sha256(os.fsencode(path)).hexdigest()[:_NAME_DIGITS]
    with suppress(OSError, ValueError):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_record(directory / f"{name}.json", IndexEntry(run_dir=path))


def indexed_runs() -> list[RunDirectory]:
    """Return the runs of the index that still exist, in no order."""
    return [RunDirectory(path) for _, path in _entries() if is_run(path)]


def missing_runs() -> list[Path]:
    """Return the directories of the runs of the index that do not exist any more."""
    return [path for _, path in _entries() if not exists(path)]


def forget_missing_runs(below: Path | None = None) -> None:
    """Remove the entries of runs that do not exist any more.

    Args:
        below: the directory that the runs were in; None is any.
    """
    for file, path in list(_entries()):
        if not exists(path) and (below is None or path.is_relative_to(below)):
            with suppress(OSError):
                file.unlink()


def scan(directory: Path) -> list[RunDirectory]:
    """Write every run of this user below a directory into the index, and remove the entries of runs that are gone.

    Args:
        directory: a run root, or a directory above some.

    Returns:
        The runs that were found.
    """
    forget_missing_runs()
    runs = [RunDirectory(path) for path in _below(directory.absolute(), _DEEPEST)]
    for run in runs:
        add_to_index(run)
    return runs


def is_run(path: Path) -> bool:
    """Return whether a run has begun or been submitted in a directory."""
    run = RunDirectory(path)
    # Mostly the first one is there. A path takes as long to build as the look at it.
    return exists(run.job_file) or exists(run.attempts) or exists(run.script) or exists(run.checkpoints)


def directories(path: Path) -> Iterator[Path]:
    """Yield the directories in a directory that are not hidden; none if it is closed to this user."""
    with suppress(OSError), os.scandir(path) as entries:
        yield from (Path(entry) for entry in entries if not entry.name.startswith(".") and entry.is_dir())


def _below(path: Path, levels: int) -> Iterator[Path]:
    """Yield the run directories of this user at most some levels below a directory."""
    for folder in directories(path):
        if folder.is_symlink():
            continue
        if is_run(folder):
            with suppress(OSError):
                if folder.stat().st_uid == os.getuid():
                    yield folder
        elif levels > 1:
            yield from _below(folder, levels - 1)


def _entries() -> Iterator[tuple[Path, Path]]:
    """Yield the files of the index, each with the run directory that it names."""
    directory = index_directory()
    files: list[Path] = []
    with suppress(OSError):
        files = [] if directory is None else list(directory.glob("*.json"))
    for file in files:
        # An entry that cannot be read is as good as none.
        with suppress(RecordError):
            entry = read_record(file, IndexEntry)
            if entry is not None and Path(entry.run_dir).is_absolute():
                yield file, Path(entry.run_dir)
