"""Runs whose directory was moved or copied since they were submitted.

A run's script names the run directory, and acts on the directory that it names. After a move that is the old place. In
a copy it is the original, which nothing that is done to the copy may touch.
"""

from __future__ import annotations

import re
import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpcddp.run.directory import RunDirectory
from hpcddp.run.files import write_text
from hpcddp.run.job_records import Start, SubmissionRecord, newest_start, read_submission
from hpcddp.run.ownership import RunDirectoryError
from hpcddp.run.result import resume_command
from hpcddp.run.sweep import sweep_of
from hpcddp.slurm.directives import Directive

_WORD = r"""((?:'[^']*'|"[^"]*"|[^\s'"])+)"""
_BEGIN = re.compile(rf"hpcddp\.(?:supervise|launch\.attempt) begin --run-root={_WORD} --name={_WORD} --run-id={_WORD}")
# Of a run, and of the elements of a sweep.
_LOGS = ("/batch.log", "/logs/%A_%a.log")


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """What a script says of its run directory.

    Args:
        run_root: where runs live; relative to the directory of submission.
        name: the folder of the run in it.
        run_id: the run's id.
    """

    run_root: str
    name: str
    run_id: str

    @property
    def path(self) -> Path:
        """The run directory, as the script names it."""
        return Path(self.run_root, self.name, self.run_id)


def holder_of(run: RunDirectory) -> RunDirectory:
    """Return the directory that holds the script of a run: an element has that of its sweep, unless it has its own."""
    sweep = None if run.script.exists() else sweep_of(run)
    return run if sweep is None else sweep.directory


def original_of(run: RunDirectory) -> Path | None:
    """Return the existing run directory that this one is a copy of; None if it is no copy, or this is unknown.

    If the original does not exist any more, the directory was moved to another file system or restored from a backup.

    Args:
        run: a run or a sweep, which may have been moved.
    """
    holder = holder_of(run)
    record = _record(holder)
    inode = None if record is None else record.inode
    if not holder.path.exists() or inode == holder.path.stat().st_ino:
        return None
    named = _place(holder, record) or _recorded(record)
    return None if named is None or is_same_directory(named, holder.path) or not _exists(named) else named


def refuse_copy(run: RunDirectory) -> None:
    """Refuse to act on the job of a run from a copy of its directory.

    Raises:
        RunDirectoryError: the directory is a copy.
    """
    if (original := original_of(run)) is not None:
        raise RunDirectoryError(
            f"{run.path} is a copy of the run {original}, whose job it does not own; name that run, or use Slurm's own "
            "commands"
        )


def refuse_other_script(script: str | None, directory: Path) -> None:
    """Refuse a script that was kept in one run directory and acts on another.

    Args:
        script: the script that was given to sbatch, as Slurm knows it; None if it does not say.
        directory: the directory that the script acts on.

    Raises:
        RunDirectoryError: the script was kept for a run elsewhere.
    """
    kept = RunDirectory(Path(script or "").parent)
    if script == str(kept.script) and kept.submission.exists() and not is_same_directory(kept.path, directory):
        raise RunDirectoryError(
            f"{script} acts on the run directory {directory}, because the directory that it lies in was moved or "
            f"copied; continue that one with: {resume_command(kept)}"
        )


def follow(run: RunDirectory, directory: Path) -> tuple[RunDirectory, Path]:
    """Make the script of a run act on the run's directory, wherever that is now.

    Args:
        run: the run, which is no copy of one that is still there.
        directory: the directory of submission.

    Returns:
        The run, called as its script calls it, and the directory to submit from.

    Raises:
        RunDirectoryError: the script or the directory of submission is not there, or the script is not hpcddp's own.
    """
    holder = holder_of(run)
    if not holder.script.exists():
        raise RunDirectoryError(
            f"the script of the run {run.path} is not there; if the run is an element of a sweep, put the directory of "
            f"its sweep beside it, or give the job file too: {_with_job(run)}"
        )
    script = holder.script.read_text(encoding="utf-8")
    named = _named(script)
    if named is None:
        recorded = _recorded(_record(holder))
        if recorded is not None and not is_same_directory(recorded, holder.path):
            raise RunDirectoryError(
                f"the run {run.path} was moved, and its script, which is of a template of your own, cannot follow it; "
                f"give the job file too: {_with_job(run)}"
            )
        return run, directory
    place = directory / named.path
    if is_same_directory(place, holder.path):
        return RunDirectory(place if holder is run else place.with_name(run.run_id)), directory
    if not directory.is_dir():
        # The whole project was moved: a relative run_root leads to the run from its new place.
        above = next((parent for parent in holder.path.parents if parent / named.path == holder.path), None)
        if above is None or named.path.is_absolute():
            raise RunDirectoryError(
                f"the run {run.path} was submitted from {directory}, which is not there any more; give the job file "
                f"too, in the directory that the code is in now: {_with_job(run)}"
            )
        return run, above
    write_text(holder.script, moved_script(script, named, holder))
    return run, directory


def moved_script(script: str, named: Named, run: RunDirectory) -> str:
    """Return a script that acts on another run directory than it did.

    Args:
        script: the script.
        named: what it says of its run directory.
        run: the run or the sweep to act on.
    """
    words = {"run-root": run.path.parent.parent, "name": run.path.parent.name, "run-id": run.run_id}
    begin = " ".join(f"--{option}={shlex.quote(str(word))}" for option, word in words.items())
    script = _BEGIN.sub(lambda _: f"hpcddp.supervise begin {begin}", script)
    before = f"{named.run_root.rstrip('/')}/{named.name}/{named.run_id}".replace("%", "%%")
    for flag in ("output", "error"):
        for log in _LOGS:
            script = script.replace(
                f"#SBATCH {Directive(flag, f'{before}{log}')}\n", f"#SBATCH {Directive(flag, f'{run.path}{log}')}\n", 1
            )
    return script


def _exists(path: Path) -> bool:
    """Return whether a path exists; one that must not be read exists."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def _record(holder: RunDirectory) -> SubmissionRecord | Start | None:
    """Return what was written down when a run was submitted, or when it began if that was by hand."""
    return read_submission(holder) or newest_start(holder)


def _recorded(record: SubmissionRecord | Start | None) -> Path | None:
    """Return the run directory that a record was written in; None if it does not say."""
    return Path(record.run_dir) if record is not None and record.run_dir else None


def _place(holder: RunDirectory, record: SubmissionRecord | Start | None) -> Path | None:
    """Return the directory that a script acts on; None if nobody can tell."""
    if not holder.script.exists() or not isinstance(record, SubmissionRecord):
        return None
    named = _named(holder.script.read_text(encoding="utf-8"))
    return None if named is None else Path(record.directory) / named.path


def _named(script: str) -> Named | None:
    """Return what a script says of its run directory; None where a template of the user's own says it otherwise."""
    found = list(_BEGIN.finditer(script))
    if len(found) != 1:
        return None
    (run_root,), (name,), (run_id,) = (shlex.split(word) for word in found[0].groups())
    return Named(run_root=run_root, name=name, run_id=run_id)


def is_same_directory(one: Path, other: Path) -> bool:
    """Return whether two paths lead to the same directory; of paths that do not exist, whether they are equal."""
    with suppress(OSError):
        return one == other or one.samefile(other)
    return False


def _with_job(run: RunDirectory) -> str:
    return shlex.join(["hpcddp", "submit", "JOB", "--resume", str(run.path)])
