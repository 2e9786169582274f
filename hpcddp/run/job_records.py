"""Records of the jobs that a run was given to: ``submission.json`` of the newest, ``start.json`` of each attempt."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from hpcddp.run.directory import AttemptDirectory, RunDirectory
from hpcddp.run.record import Record, read_record, write_record


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmissionRecord(Record):
    """Where a run went when it was handed over last.

    Args:
        cluster: where.
        job_id: Slurm's job id, or the process id of a local run.
        directory: the directory of submission.
        python: the interpreter of its tasks.
        time: when, in seconds since the epoch; None in records of earlier versions.
        sweep: the id of the sweep that the run is an element of; None for a run of its own.
        index: which element it is.
        run_dir: the run directory.
        inode: its inode number; see ``identity`` in ``hpcddp.run.ownership``.
    """

    ADVICE: ClassVar[str] = (
        "Slurm's own commands (squeue, scancel) still act on its job; to go on with the run, remove this file, and "
        "give the job file too: hpcddp submit JOB --resume RUN"
    )

    cluster: Literal["slurm", "local"]
    job_id: str
    directory: str
    python: str
    time: float | None = None
    sweep: str | None = None
    index: int | None = None
    run_dir: str | None = None
    inode: int | None = None


def read_submission(run: RunDirectory) -> SubmissionRecord | None:
    """Return where a run went, or None if its script was submitted by hand.

    Raises:
        RecordError: the record is damaged.
    """
    return read_record(run.submission, SubmissionRecord)


def write_submission_record(run: RunDirectory, record: SubmissionRecord) -> None:
    """Write where a run went."""
    write_record(run.submission, record)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start(Record):
    """Who started an attempt.

    Args:
        job_id: Slurm's job id, or the process id of a local run; None by hand.
        host: where the batch script runs.
        time: seconds since the epoch.
        restart_count: how often Slurm has requeued the job before.
        submit_time: Slurm's submit time of this start, None if it could not be asked. Slurm renews it at every requeue.
        token: what only this attempt knows; empty where no ranks meet by it.
        end_time: when the job's time is over, in seconds since the epoch; None without a limit.
        run_dir: the run directory.
        inode: its inode number; see ``identity`` in ``hpcddp.run.ownership``.
        is_local: whether the job is a process of its host; None in records of earlier versions.
        pid: the process of a program of the user's own that has begun the attempt itself; else None.
    """

    ADVICE: ClassVar[str] = (
        "its checkpoints and logs are as they were; to go on with the run, make sure that its job has ended (squeue), "
        "and remove this file"
    )

    job_id: str | None
    host: str
    time: float
    restart_count: int = 0
    submit_time: str | None = None
    token: str = ""
    end_time: float | None = None
    run_dir: str | None = None
    inode: int | None = None
    is_local: bool | None = None
    pid: int | None = None

    @property
    def is_process(self) -> bool:
        """Whether the job id is that of a process; Slurm knows the submit time of its own jobs."""
        return self.submit_time is None if self.is_local is None else self.is_local


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal(Record):
    """Why a job was refused: ``refused-<job id>.json``.

    Args:
        why: a sentence.
    """

    ADVICE: ClassVar[str] = "its job was refused once, and stays refused; use another run id or run_root"

    why: str

    @classmethod
    def upgraded(cls, document: object) -> object:
        """Return a document of version 0, which is the sentence alone, in the layout of version 1."""
        return {"why": document} if isinstance(document, str) else document


def _refusal(run: RunDirectory, job_id: str | None) -> Path:
    return run.path / f"refused-{job_id}.json"


def read_refusal(run: RunDirectory, job_id: str | None) -> str | None:
    """Return why a job was refused before, or None if it was not.

    Raises:
        RecordError: the record is damaged.
    """
    refusal = read_record(_refusal(run, job_id), Refusal)
    return None if refusal is None else refusal.why


def write_refusal(run: RunDirectory, job_id: str | None, why: str) -> None:
    """Write why a job is refused."""
    write_record(_refusal(run, job_id), Refusal(why=why))


def read_start(attempt: AttemptDirectory) -> Start | None:
    """Return who started an attempt, or None if nobody has yet.

    Raises:
        RecordError: the record is damaged.
    """
    return read_record(attempt.start, Start)


def write_start(attempt: AttemptDirectory, start: Start) -> None:
    """Write who starts an attempt."""
    write_record(attempt.start, start)


def newest_start(run: RunDirectory) -> Start | None:
    """Return who started the newest attempt of a run, or None if none has started.

    Raises:
        RecordError: the record is damaged.
    """
    number = run.newest_attempt()
    return None if number is None else read_start(run.attempt(number))
