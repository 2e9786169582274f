"""Whether a job may use a run directory: a run belongs to one job at a time."""

from __future__ import annotations

import json
import os
import shlex
import socket
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from hpcddp.errors import HpcddpError, UserError
from hpcddp.processes import command_line, environment_of, own_processes
from hpcddp.run.directory import RunDirectory
from hpcddp.run.files import is_full, trusted_users
from hpcddp.run.job_records import Change, Start
from hpcddp.slurm.job import ENDED_STATES, wait_for_answer
from hpcddp.stop.reasons import ExitCode

if TYPE_CHECKING:
    from hpcddp.jobfile.job import JobSpec

_SCRIPT: Final = RunDirectory(Path()).script.name


class RunDirectoryError(UserError):
    """The run directory cannot be used."""

    kind = "run_directory"


def conflict(previous: Start | None, start: Start, *, previous_alive: bool) -> str | None:
    """Return why ``start`` must not use the directory that ``previous`` used, or None if it may.

    Args:
        previous: who started the newest attempt there; None if there was none.
        start: who wants to start now.
        previous_alive: whether the job of ``previous`` is known to be alive, when it is another job.
    """
    if previous is None:
        return None
    if previous.job_id != start.job_id:
        return f"job {previous.job_id} is still using it" if previous_alive else None
    if start.is_local:
        # A process has the number of an earlier one only after that has ended, as in each new container.
        return None
    # A slurmctld that was killed just after it started the job starts it once more, with the same count.
    if start.restart_count > previous.restart_count or start.restart_count == previous.restart_count > 0:
        return None
    # A rebuilt cluster reuses job ids; a requeue of the same job has a higher restart count.
    return (
        f"it belongs to another job {previous.job_id}, submitted at {previous.submit_time}; "
        f"this one was submitted at {start.submit_time}"
    )


def is_alive(start: Start, *, patience_s: float = 0.0) -> bool:
    """Return whether the job of a start still runs, or waits to run again, with the information available.

    Args:
        patience_s: how long to retry while Slurm's controller does not answer, in seconds.

    Raises:
        SlurmUnavailableError: the controller did not answer in time.
    """
    if start.job_id is None:
        return False
    if start.is_local:
        return start.host == socket.gethostname() and runs_script(command_line(start.job_id))
    job = wait_for_answer(start.job_id, patience_s=patience_s)
    if job is None or job.get("JobState") in ENDED_STATES:
        return False
    if start.submit_time is None:
        return True
    # Slurm renews the submit time at a requeue; a job from before the cluster was rebuilt has neither.
    return job.get("SubmitTime") == start.submit_time or int(job.get("Restarts", "0")) > start.restart_count


def runs_script(words: Collection[str]) -> bool:
    """Return whether a command line is that of a batch script: the kernel gives the number of a process again.

    The name of the script is compared, not its path, since a run directory can be moved while its job runs.
    """
    return any(word.rpartition("/")[2] == _SCRIPT for word in words)


def processes_left(run: RunDirectory) -> list[int]:
    """Return the user's processes on this machine that belong to attempts of a run, by their environment.

    Args:
        run: the run; its batch script has ended.
    """
    pids = []
    for pid in (process.pid for process in own_processes() if process.pid != os.getpid()):
        attempt = environment_of(pid).get("HPCDDP_ATTEMPT_DIR")
        # Not compared as text: a link may lead to the run.
        with suppress(OSError):
            if attempt is not None and Path(attempt).parent.samefile(run.attempts):
                pids.append(pid)
    return sorted(pids)


def refuse_another_training(
    run: RunDirectory, spec: JobSpec, named: Collection[str] = frozenset()
) -> tuple[Change, ...]:
    """Refuse a job that would not continue the training of a run.

    Args:
        run: the run; a new one takes any job.
        spec: the job that is to continue it.
        named: the key paths that the command line sets.

    Returns:
        The changes that are allowed because they are named.

    Raises:
        RunDirectoryError: names what differs, both values, and how to ask for the change if that is possible.
    """
    # It builds the models of the job file, which a task of a command and a table of runs do without.
    from hpcddp.run.job_file import read_job_file

    if not run.job_file.exists():
        return ()
    changes = tuple(training_changes(read_job_file(run), spec))
    for change in changes:
        why = _why_not(change)
        if why is None and change.key in named:
            continue
        advice = "restore the old value, or submit a new run"
        if why is None:
            why = "and such a change is made only if the command line names it"
            advice = f"restore the old value, or ask for it: {_request(run, change)}"
        raise RunDirectoryError(
            f"the run {run.path} cannot go on with this job: {change.key} is {json.dumps(change.before)} there and "
            f"{json.dumps(change.after)} here, {why}; {advice}"
        )
    return changes


def _why_not(change: Change) -> str | None:
    """Return why a change cannot be made, even if the command line asks for it; None if it can."""
    from hpcddp.jobfile.job import on_resume

    another_training = "which would be another training"
    if on_resume(tuple(change.key.split("."))) != "by name":
        return another_training
    if change.key == _EPOCHS and change.after < change.before:
        return "and a run cannot go on with fewer epochs"
    if change.key == "command" and (change.before is None or change.after is None):
        return another_training
    return None


def _request(run: RunDirectory, change: Change) -> str:
    """Return the command that asks for a change by name."""
    resume = ["hpcddp", "submit", "--resume", str(run.path)]
    if change.key == "command":
        return shlex.join([*resume, "--", *change.after])
    # Texts among these fields are plain words.
    value = change.after if isinstance(change.after, str) else json.dumps(change.after)
    return shlex.join([*resume, "--set", f"{change.key}={value}"])


def make_private_directory(path: Path) -> None:
    """Create ``path`` and its parents with mode 0700, and refuse a place that others could write to.

    Raises:
        RunDirectoryError: it is not the user's own, others may write to it, or a parent lets somebody replace it.
    """
    try:
        for parent in [*reversed(path.parents), path]:
            if not parent.exists():
                parent.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        if is_full(error):
            raise
        raise RunDirectoryError(
            f"the run directory {path} cannot be created: {error.strerror}; choose another run_root"
        ) from error
    for sentence in _dangers(path):
        raise RunDirectoryError(sentence)


def check_run_directory(path: Path) -> None:
    """Refuse a run directory that another user made or could have written to; call it before anything in it is read.

    Args:
        path: the directory; one that does not exist holds nothing to be afraid of.

    Raises:
        RunDirectoryError: it or a file in it is not the user's own, others may write to it, or a parent lets somebody
            replace it.
    """
    if not path.exists():
        return
    for sentence in (*_dangers(path), *_foreign_files(path)):
        raise RunDirectoryError(sentence)


def group_writable_warnings(path: Path) -> list[str]:
    """Return a sentence if a group could put something else in the place of ``path``: it names every directory above.

    One sentence for all of them, since under umask 002 every directory of a project is such a one.
    """
    writable = [
        str(parent)
        for parent in path.resolve().parents
        if parent.stat().st_mode & (stat.S_IWGRP | stat.S_ISVTX) == stat.S_IWGRP
    ]
    if not writable:
        return []
    can = "can be written by its group" if len(writable) == 1 else "can be written by their groups"
    where = f"{', '.join(writable)}, above the run directory, {can}"
    return [
        f"{where}, who could put other files in its place; run: chmod g-w {shlex.join(writable)}, or trust the group"
    ]


def _dangers(path: Path) -> Iterator[str]:
    """Yield why a pickle in ``path`` might not be the user's own."""
    status = path.stat()
    if not path.is_dir():
        yield f"the run directory {path} is not a directory; choose another run_root"
    if status.st_uid != os.getuid():
        yield (
            f"the run directory {path} belongs to user {status.st_uid}, not to you; choose another run_root, or a run "
            "of your own"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        yield f"the run directory {path} can be written by others; run: chmod go-w {path}"
    trusted = trusted_users()
    for parent in dict.fromkeys([*path.absolute().parents, *path.resolve().parents]):
        above = parent.stat()
        if above.st_uid not in trusted:
            yield (
                f"{parent}, above the run directory, belongs to user {above.st_uid}, who could put other files in its "
                "place; choose another run_root"
            )
        if above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX:
            yield f"{parent}, above the run directory, can be written by everyone; choose another run_root"


def _foreign_files(path: Path) -> Iterator[str]:
    """Yield what another user put into a directory while it could be written by others."""
    trusted = trusted_users()
    for entry in sorted(path.iterdir()):
        owner = entry.lstat().st_uid
        if owner not in trusted:
            yield f"{entry} belongs to user {owner}, not to you; do not use this run, or remove what is not yours first"


class FencedError(HpcddpError):
    """Another attempt owns the run; this one must not write."""

    kind = "fenced"
    exit_code: ClassVar[int] = ExitCode.FENCED


def fenced_sentence(run: RunDirectory, *, newest: int | None, attempt: int) -> str:
    """Return what an attempt of a run says when it finds that a newer one has begun."""
    return f"attempt {newest} owns the run {run.run_id}, so attempt {attempt} ends here and writes nothing"


def raise_if_fenced(run: RunDirectory, attempt: int) -> None:
    """Refuse to write for an attempt that is no longer the newest.

    Raises:
        FencedError: another attempt owns the run.
    """
    newest = run.newest_attempt()
    if newest is not None and newest != attempt:
        raise FencedError(fenced_sentence(run, newest=newest, attempt=attempt))


_EPOCHS: Final = "train.epochs"
BATCH: Final = "batch.global_batch_size"


def training_changes(before: JobSpec, now: JobSpec) -> Iterator[Change]:
    """Yield what would make another training of it: changes of fields that may not always change.

    Args:
        before: the job that the run had.
        now: the job that is to continue it.
    """
    yield from _changes(before.model_dump(mode="json"), now.model_dump(mode="json"), ())


def _changes(before: Mapping[str, Any], now: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[Change]:
    from hpcddp.jobfile.job import on_resume

    for name, value in now.items():
        path = (*above, name)
        if on_resume(path) == "always" or before.get(name) == value:
            continue
        if isinstance(value, Mapping) and isinstance(before.get(name), Mapping):
            yield from _changes(before[name], value, path)
        else:
            yield Change(key=".".join(path), before=before.get(name), after=value)
