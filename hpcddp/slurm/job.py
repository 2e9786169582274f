"""Ask Slurm about one job, and read its answer."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

from hpcddp.slurm import commands
from hpcddp.stop.reasons import JobFacts

_PAUSE_S = 2.0


def slurm_job_id(environment: Mapping[str, str]) -> str | None:
    """Return the id of this job in Slurm (``123``, ``123_4`` for an array element); None for a local run.

    Args:
        environment: the environment of the batch script or of a task.
    """
    if "HPCDDP_LOCAL_JOB_ID" in environment:
        return None
    if "SLURM_ARRAY_JOB_ID" in environment:
        return f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment.get("SLURM_JOB_ID")


def ask_slurm(job_id: str, *, patience_s: float = 0.0) -> dict[str, str] | None:
    """Return the record of a job; None also if scontrol is not installed, as on some compute nodes.

    Args:
        job_id: the job.
        patience_s: how long to retry while the controller does not answer, in seconds.
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
    """Return whether the same command may succeed when the controller responds again."""
    return isinstance(error, commands.SlurmUnavailableError) and not isinstance(error, commands.SlurmMissingError)


def facts_of(
    job: Mapping[str, str] | None, *, restarts_at_start: int, warned: bool = False, error_seen: bool = False
) -> JobFacts:
    """Return the facts that ``cause_of`` needs from the record of a job.

    Args:
        job: the fields of ``scontrol show job``; None if there is no answer.
        restarts_at_start: the restart count when this attempt started.
        warned: whether the signal that comes before the time limit arrived.
        error_seen: whether a failure record of this attempt exists.
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


ENDED_STATES = frozenset(
    {
        "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
        "TIMEOUT",
    }
)  # fmt: skip
"""Slurm's states of a job that has ended; Slurm forgets such a job after a while, or reuses its id."""
