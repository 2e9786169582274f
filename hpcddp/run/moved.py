"""Runs whose directory was moved or copied since they were submitted.

A run's script contains the path of its run directory. After a move the path is outdated; in a copy it is that of the
original, which must not be changed.
"""

from __future__ import annotations

import re
import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpcddp.run.directory import RunDirectory
from hpcddp.run.files import write_text
from hpcddp.run.job_file import read_script
from hpcddp.run.job_records import Start, SubmissionRecord, newest_start, read_submission
from hpcddp.run.ownership import RunDirectoryError
from hpcddp.run.result import resume_command
from hpcddp.run.sweep import sweep_of
from hpcddp.slurm.directives import Directive

_WORD = r"""((?:'[^']*'|"[^"]*"|[^\s'"])+)"""
_BEGIN = re.compile(rf"hpcddp\.supervise begin --run-root={_WORD} --name={_WORD} --run-id={_WORD}")
# Of a run, and of the elements of a sweep.
_LOGS = ("/batch.log", "/logs/%A_%a.log")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptRunDirectory:
    """The run directory in a script.

    Args:
        run_root: the directory of all runs; relative to the directory of submission.
        name: the folder of the run in it.
    """

    run_root: str
    name: str
    run_id: str

    @property
    def path(self) -> Path:
        """Its path in the script."""
        return Path(self.run_root, self.name, self.run_id)


def script_owner(run: RunDirectory) -> RunDirectory:
    """Return the directory with the script of a run: for an element that of its sweep, unless it has a script."""
    sweep = None if run.script.exists() else sweep_of(run)
    return run if sweep is None else sweep.directory


def original_of(run: RunDirectory) -> Path | None:
    """Return the existing run directory that this one is a copy of; None if it is no copy, or this is unknown.

    If the original does not exist any more, the directory was moved to another file system or restored from a backup.

    Args:
        run: a run or a sweep, which may have been moved.
    """
    owner = script_owner(run)
    record = _record(owner)
    if not owner.path.exists():
        return None
    if record is not None and record.inode == owner.path.stat().st_ino:
        return None
    original = _directory_in_script(owner, record) or _recorded_directory(record)
    if original is None or is_same_directory(original, owner.path):
        return None
    return original if _exists(original) else None


def moved_from(run: RunDirectory) -> Path | None:
    """Return the directory in which a run was submitted, if it was moved or renamed since; None if not, or unknown.

    Args:
        run: a run or an element of a sweep; the directory of an element is that of its sweep.

    Raises:
        RecordError: a record of the run cannot be read.
    """
    owner = script_owner(run)
    submitted_in = _recorded_directory(_record(owner))
    if submitted_in is None or is_same_directory(submitted_in, owner.path) or original_of(run) is not None:
        return None
    return submitted_in


def refuse_copy(run: RunDirectory) -> None:
    """Refuse to act on the job of a run from a copy of its directory.

    Raises:
        RunDirectoryError: the directory is a copy.
    """
    original = original_of(run)
    if original is not None:
        raise RunDirectoryError(
            f"{run.path} is a copy of the run {original}, whose job it does not own; name that run, or use Slurm's own "
            "commands"
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


def usable_script(run: RunDirectory) -> str:
    """Return the script with which a run continues: its own, or that of its sweep.

    Raises:
        RunDirectoryError: it does not exist, or is empty.
        RecordError: it cannot be read.
    """
    owner = script_owner(run)
    if not owner.script.exists():
        raise RunDirectoryError(
            f"the script of the run {run.path} does not exist; if the run is an element of a sweep, put the directory "
            f"of its sweep beside it, or give the job file too: {resume_command(run, with_job=True)}"
        )
    script = read_script(owner)
    if not script:
        raise RunDirectoryError(
            f"{owner.script} is empty; restore a copy of it, or give the job file too: "
            f"{resume_command(run, with_job=True)}"
        )
    return script


def update_script_path(run: RunDirectory, directory: Path) -> tuple[RunDirectory, Path]:
    """Update the path of the run directory in a run's script after a move.

    Args:
        run: the run, which is not a copy of an existing one.
        directory: the directory of submission.

    Returns:
        The run with its path as in the script, and the directory to submit from.

    Raises:
        RunDirectoryError: the script or the directory of submission does not exist, the script is empty, or it is of a
            template of the user's own.
    """
    owner = script_owner(run)
    script = usable_script(run)
    in_script = _parse_script(script)
    if in_script is None:
        _refuse_moved_script_of_own_template(run)
        return run, directory
    path = directory / in_script.path
    if is_same_directory(path, owner.path):
        path_of_run = path if owner is run else path.with_name(run.run_id)
        return RunDirectory(path_of_run), directory
    if directory.is_dir():
        write_text(owner.script, moved_script(script, in_script, owner))
        return run, directory
    # The whole project was moved: a relative run_root leads to the run from its new path.
    if not in_script.path.is_absolute():
        for parent in owner.path.parents:
            if parent / in_script.path == owner.path:
                return run, parent
    raise RunDirectoryError(
        f"the run {run.path} was submitted from {directory}, which no longer exists; give the job file "
        f"too, in the directory that the code is in now: {resume_command(run, with_job=True)}"
    )


def _refuse_moved_script_of_own_template(run: RunDirectory) -> None:
    """Refuse a run that was moved, for a script whose path of the run directory cannot be updated.

    Raises:
        RunDirectoryError: the run was moved.
    """
    if moved_from(run) is None:
        return
    raise RunDirectoryError(
        f"the run {run.path} was moved, and its script, which is of a template of your own, cannot be updated; "
        f"give the job file too: {resume_command(run, with_job=True)}"
    )


def moved_script(script: str, in_script: ScriptRunDirectory, run: RunDirectory) -> str:
    """Return a script with the path of another run directory.

    Args:
        run: the run or the sweep to act on.
    """
    words = {"run-root": run.run_root, "name": run.name, "run-id": run.run_id}
    begin = " ".join(f"--{option}={shlex.quote(str(word))}" for option, word in words.items())
    script = _BEGIN.sub(lambda _: f"hpcddp.supervise begin {begin}", script)
    old_path = f"{in_script.run_root.rstrip('/')}/{in_script.name}/{in_script.run_id}".replace("%", "%%")
    for flag in ("output", "error"):
        for log in _LOGS:
            old_line = f"#SBATCH {Directive(flag, old_path + log)}\n"
            new_line = f"#SBATCH {Directive(flag, str(run.path) + log)}\n"
            script = script.replace(old_line, new_line, 1)
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


def _record(owner: RunDirectory) -> SubmissionRecord | Start | None:
    """Return the record of a run's newest submission, or of its newest start if it was submitted by hand."""
    return read_submission(owner) or newest_start(owner)


def _recorded_directory(record: SubmissionRecord | Start | None) -> Path | None:
    """Return the run directory in a record; None if a program of the user's own has begun the run."""
    return Path(record.run_dir) if record is not None and record.run_dir else None


def _directory_in_script(owner: RunDirectory, record: SubmissionRecord | Start | None) -> Path | None:
    """Return the directory that a script acts on; None if unknown."""
    if not owner.script.exists() or not isinstance(record, SubmissionRecord):
        return None
    in_script = _parse_script(read_script(owner))
    return None if in_script is None else Path(record.directory) / in_script.path


def _parse_script(script: str) -> ScriptRunDirectory | None:
    """Return the run directory in a script; None if a template of the user's own has it in another form."""
    calls = list(_BEGIN.finditer(script))
    if len(calls) != 1:
        return None
    (run_root,), (name,), (run_id,) = (shlex.split(word) for word in calls[0].groups())
    return ScriptRunDirectory(run_root=run_root, name=name, run_id=run_id)


def is_same_directory(first: Path, other: Path) -> bool:
    """Return whether two paths lead to the same directory; of paths that do not exist, whether they are equal."""
    with suppress(OSError):
        return first == other or first.samefile(other)
    return False
