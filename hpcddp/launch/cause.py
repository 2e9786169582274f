"""Asking Slurm why a job must go, where Slurm can be asked."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.failure import read_failures
from hpcddp.run.files import read_json
from hpcddp.slurm import commands
from hpcddp.stop.cause import Cause, JobFacts, cause_of

_PAUSE_S = 2.0


def slurm_job_id(environment: Mapping[str, str]) -> str | None:
    """Return the name that Slurm has for this job (``123``, ``123_4`` for an array element); None for a local run.

    Args:
        environment: the environment of the batch script or of a task.
    """
    if "HPCDDP_LOCAL_JOB_ID" in environment:
        return None
    if "SLURM_ARRAY_JOB_ID" in environment:
        return f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment.get("SLURM_JOB_ID")


def ask_slurm(job_id: str, *, patience_s: float = 0.0) -> dict[str, str] | None:
    """Return what Slurm knows about a job; None also where scontrol is missing, as it is on some compute nodes.

    Args:
        job_id: the job.
        patience_s: how long to ask again while the controller does not answer, in seconds.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return commands.show_job(job_id)
        except commands.SlurmCommandError as error:
            if not may_help_later(error) or time.monotonic() >= deadline:
                sys.stderr.write(f"hpcddp: {error.message}\n")
                return None
        time.sleep(_PAUSE_S)


def may_help_later(error: commands.SlurmCommandError) -> bool:
    """Return whether the same command may succeed when the controller is back."""
    return isinstance(error, commands.SlurmUnavailableError) and not isinstance(error, commands.SlurmMissingError)


def facts_of(
    job: Mapping[str, str] | None, *, restarts_at_start: int, warned: bool = False, error_seen: bool = False
) -> JobFacts:
    """Return what ``scontrol show job`` says, as the table of causes reads it.

    Args:
        job: its fields; None without an answer.
        restarts_at_start: the restart count that this attempt was started with.
        warned: whether the signal that comes before the time limit was seen.
        error_seen: whether an error record of this attempt exists.
    """
    known = job or {}
    restarts = known.get("Restarts")
    return JobFacts(
        state=known.get("JobState"),
        restarts=None if restarts is None else int(restarts),
        restarts_at_start=restarts_at_start,
        preempted=known.get("PreemptTime", "None") != "None",
        reason=known.get("Reason"),
        warned=warned,
        error_seen=error_seen,
    )


def ask_cause(attempt: AttemptDirectory, environment: Mapping[str, str], *, warned: bool) -> Cause:
    """Return why this job was signalled: Slurm is asked once, and what it does not say is ``unknown``.

    Args:
        attempt: the attempt that runs.
        environment: the environment of the batch script or of a task.
        warned: whether the signal was the one that comes before the time limit.
    """
    if warned and attempt.requeue_request.exists():
        # The same signal, sent by the run's user.
        return Cause.REQUEUED
    job_id = slurm_job_id(environment)
    job = ask_slurm(job_id) if job_id else None
    start = read_json(attempt.start) or {}
    return cause_of(
        facts_of(
            job,
            restarts_at_start=int(start.get("restart_count", 0)),
            warned=warned,
            error_seen=bool(read_failures(attempt)),
        )
    )
