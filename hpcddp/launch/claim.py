"""Whether a job may use a run directory: a run belongs to one job at a time."""

from __future__ import annotations

import json
import os
import shlex
import socket
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpcddp.errors import UserError
from hpcddp.launch.cause import ask_slurm
from hpcddp.run.directory import RunDirectory
from hpcddp.run.files import read_json
from hpcddp.spec.continuation import training_changes
from hpcddp.spec.job import JobSpec
from hpcddp.spec.write import parse_resolved

ENDED_STATES = frozenset(
    {
        "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
        "TIMEOUT",
    }
)  # fmt: skip
"""Slurm's words for a job that is over; it forgets such a job after a while, or runs its id again."""


class RunDirectoryError(UserError):
    """The run directory cannot be used."""

    kind = "run_directory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Who started an attempt.

    Args:
        job_id: Slurm's job id, or the process id of a local run; None by hand.
        restart_count: how often Slurm has requeued the job before.
        submit_time: Slurm's submit time of this start, None if it could not be asked. Slurm renews it at every requeue.
        host: where the batch script runs.
        token: what only this attempt knows.
        time: seconds since the epoch.
        end_time: when the job's time is over, in seconds since the epoch; None without a limit.
    """

    job_id: str | None
    restart_count: int
    submit_time: str | None
    host: str
    token: str
    time: float
    end_time: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the document for ``start.json``."""
        return asdict(self)


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
    if start.restart_count > previous.restart_count:
        return None
    # Job ids come again after a cluster is rebuilt; a requeue of the same job has a higher restart count.
    return (
        f"it belongs to another job {previous.job_id}, submitted at {previous.submit_time}; "
        f"this one was submitted at {start.submit_time}"
    )


def newest_start(run: RunDirectory) -> Start | None:
    """Return who started the newest attempt of a run, or None if none has started."""
    number = run.newest_attempt()
    document = None if number is None else read_json(run.attempt(number).start)
    return None if document is None else Start(**document)


def is_alive(start: Start) -> bool:
    """Return whether the job of a start still runs, or waits to run again, as far as anybody can tell."""
    if start.job_id is None:
        return False
    if start.submit_time is None:
        return start.host == socket.gethostname() and Path(f"/proc/{start.job_id}").exists()
    job = ask_slurm(start.job_id)
    if job is None or job.get("JobState") in ENDED_STATES:
        return False
    # Slurm renews the submit time at a requeue; a job of another life of the cluster has neither.
    return job.get("SubmitTime") == start.submit_time or int(job.get("Restarts", "0")) > start.restart_count


def has_finished(run: RunDirectory) -> bool:
    """Return whether a run has come to its own end."""
    result = read_json(run.result)
    return result is not None and result.get("status") == "finished"


def refuse_another_training(run: RunDirectory, spec: JobSpec) -> None:
    """Refuse a job that would not go on with the training that a run holds.

    Args:
        run: the run; a new one takes any job.
        spec: the job that wants to go on with it.

    Raises:
        RunDirectoryError: names what differs, and both values.
    """
    if not run.job_file.exists():
        return
    before = parse_resolved(run.job_file.read_text(encoding="utf-8"))
    for key, old, new in training_changes(before, spec):
        raise RunDirectoryError(
            f"the run {run.path} cannot go on with this job: {key} is {json.dumps(old)} there and {json.dumps(new)} "
            "here, which would be another training; bring the old value back, or use another run id or run_root"
        )


def make_private_directory(path: Path) -> None:
    """Create ``path`` and its parents with mode 0700, and refuse a place that others could write to.

    Raises:
        RunDirectoryError: it is not the user's own, others may write to it, or a parent lets anyone replace it.
    """
    try:
        for parent in [*reversed(path.parents), path]:
            if not parent.exists():
                parent.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(
            f"the run directory {path} cannot be created: {error.strerror}; choose another run_root"
        ) from error
    for sentence in _dangers(path.resolve()):
        raise RunDirectoryError(sentence)


def group_writable_warnings(path: Path) -> list[str]:
    """Return a sentence for each directory above ``path`` in which a group could put something else in its place."""
    return [
        f"{parent}, above the run directory, can be written by its group, who could put other files in its place; "
        f"run: chmod g-w {shlex.quote(str(parent))}, or trust the group"
        for parent in path.resolve().parents
        if parent.stat().st_mode & (stat.S_IWGRP | stat.S_ISVTX) == stat.S_IWGRP
    ]


def _dangers(path: Path) -> Iterator[str]:
    """Yield why a pickle in ``path`` might not be the user's own."""
    status = path.stat()
    if not path.is_dir():
        yield f"the run directory {path} is not a directory; choose another run_root"
    if status.st_uid != os.getuid():
        yield f"the run directory {path} belongs to user {status.st_uid}, not to you; choose another run_root"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        yield f"the run directory {path} can be written by others; run: chmod go-w {path}"
    for parent in path.parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            yield f"{parent}, above the run directory, can be written by everyone; choose another run_root"
