"""The runs that must have finished before this one: Slurm has only waited for the end of their jobs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from hpcddp.errors import HpcddpError
from hpcddp.run.directory import RunDirectory
from hpcddp.run.record import RecordError
from hpcddp.run.result import FINISHED, read_result, resume_command
from hpcddp.run.sweep import ManifestError, read_sweep
from hpcddp.stop.reasons import ExitCode


class PredecessorError(HpcddpError):
    """A run that must finish before this one has ended in another way."""

    kind = "predecessor"
    exit_code: ClassVar[int] = ExitCode.INTERRUPTED


def why_unfinished(predecessors: Sequence[Path]) -> str | None:
    """Return a sentence about the first run that has not finished; None if all runs before this one have.

    Args:
        predecessors: the directories of the runs and sweeps that must have finished.
    """
    for path in predecessors:
        try:
            for run in _runs_of(path):
                if (why := _why_unfinished(run)) is not None:
                    return f"run {run.run_id}, which must finish first (--after), {why}"
        except (RecordError, ManifestError) as error:
            return f"it is not known whether {path}, which must finish first (--after), has finished: {error.message}"
    return None


def _runs_of(path: Path) -> Iterator[RunDirectory]:
    """Yield the run of a directory, or the elements of its sweep."""
    sweep = read_sweep(path)
    if sweep is None:
        yield RunDirectory(path)
        return
    for index in range(len(sweep.elements)):
        yield sweep.run(index)


def _why_unfinished(run: RunDirectory) -> str | None:
    result = read_result(run)
    if result is None:
        return "has ended without a result"
    if result.status == FINISHED:
        return None
    return f"has {result.status}; continue that one first: {resume_command(run)}"
