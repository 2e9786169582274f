"""Runs whose directory was moved or copied since they were submitted.

A record says in which directory a run was submitted. A run that was moved goes on under its new path. A copy of one
that is still there does not, because its records name the job and the trackers of the original.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from hpcddp.run.directory import RunDirectory
from hpcddp.run.files import exists
from hpcddp.run.job_records import newest_start, read_submission
from hpcddp.run.ownership import RunDirectoryError
from hpcddp.run.result import resume_command
from hpcddp.run.sweep import sweep_of


def owner_of(run: RunDirectory) -> RunDirectory:
    """Return the directory that a submission has made: for an element that of its sweep."""
    sweep = sweep_of(run)
    return run if sweep is None else sweep.directory


def _recorded_directory(run: RunDirectory) -> Path | None:
    """Return the directory in a run's newest submission, or in its newest start if it was submitted by hand.

    None if there is no record, or a program of the user's own has begun the run.
    """
    record = read_submission(run) or newest_start(run)
    return Path(record.run_dir) if record is not None and record.run_dir else None


def under_recorded_path(run: RunDirectory) -> RunDirectory:
    """Return a run with the path of its submission, if that leads to the same directory, as a link to it does."""
    recorded = _recorded_directory(run)
    return run if recorded is None or not is_same_directory(recorded, run.path) else RunDirectory(recorded)


def moved_from(run: RunDirectory) -> Path | None:
    """Return the directory in which a run was submitted, if it was moved or renamed since; None if not, or unknown.

    Args:
        run: a run or an element of a sweep; the directory of an element is that of its sweep.

    Raises:
        RecordError: a record of the run cannot be read.
    """
    owner = owner_of(run)
    recorded = _recorded_directory(owner)
    return None if recorded is None or is_same_directory(recorded, owner.path) else recorded


def refuse_copy(run: RunDirectory) -> None:
    """Refuse to act on a run, a sweep or an element in a copy of its directory.

    Raises:
        RunDirectoryError: the directory of its submission is another one, and still there.
    """
    original = moved_from(run)
    if original is not None and exists(original):
        raise RunDirectoryError(
            f"{run.path} is a copy of the run {original}, whose job it does not own; name that run, or move it away"
        )


def refuse_other_script(script: str | None, directory: Path) -> None:
    """Refuse the script in one run directory that acts on another.

    Args:
        script: the path of the script that was given to sbatch, from Slurm; None if unknown.
        directory: the directory that the script acts on.

    Raises:
        RunDirectoryError: the script is in another run directory.
    """
    kept = RunDirectory(Path(script or "").parent)
    if script == str(kept.script) and kept.submission.exists() and not is_same_directory(kept.path, directory):
        raise RunDirectoryError(
            f"{script} acts on the run directory {directory}, because the directory that it is in was moved or "
            f"copied; continue that one with: {resume_command(kept)}"
        )


def is_same_directory(first: Path, other: Path) -> bool:
    """Return whether two paths lead to the same directory; of paths that do not exist, whether they are equal."""
    with suppress(OSError):
        return first == other or first.samefile(other)
    return False
