"""The checks of a job that is to run in the allocation of this shell, as inside ``salloc``."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from typing import Final

from hpcddp.jobfile.cluster import Cluster
from hpcddp.jobfile.job import JobSpec
from hpcddp.slurm import commands
from hpcddp.slurm.directives import request_of
from hpcddp.submission.request import Obstacle

# srun numbers its steps from 0; the steps of a batch script and of salloc's own shell have the numbers above.
_LARGEST_STEP: Final = 0xFFFFFFF0


def allocation_obstacles(spec: JobSpec, cluster: Cluster, environment: Mapping[str, str]) -> Iterator[Obstacle]:
    """Yield why a job cannot run in the allocation of this shell."""
    if cluster != "here":
        return
    problem = _problem_of_shell(environment)
    if problem is None:
        problem = _problem_of_allocation(spec, environment["SLURM_JOB_ID"], environment)
    if problem is None:
        return
    salloc = ["salloc"]
    for directive in request_of(spec):
        if directive.value is None:
            salloc.append(f"--{directive.flag}")
        else:
            salloc.append(f"--{directive.flag}={directive.value}")
    yield Obstacle(
        sentence=f"--cluster here: {problem}; submit in the shell that this command opens: {shlex.join(salloc)}; or "
        "give the job to the queue: --cluster slurm",
        can_force=False,
    )


def _problem_of_shell(environment: Mapping[str, str]) -> str | None:
    """Return why this shell has no allocation for a job, or None if it names one."""
    job_id = environment.get("SLURM_JOB_ID")
    step = environment.get("SLURM_STEP_ID", "")
    if not job_id:
        return "this shell is in no allocation, because SLURM_JOB_ID is not set"
    if not (job_id.isascii() and job_id.isdecimal()):
        return f"SLURM_JOB_ID is {job_id!r}, which is not a job id"
    if step.isascii() and step.isdecimal() and int(step) < _LARGEST_STEP:
        return f"srun has started this shell as a step of job {job_id}, and the step holds the CPUs that the tasks need"
    return None


def _problem_of_allocation(spec: JobSpec, job_id: str, environment: Mapping[str, str]) -> str | None:
    """Return why the job cannot run in an allocation, or None if it can."""
    try:
        job = commands.show_job(job_id, environment=environment)
    except commands.SlurmCommandError as error:
        return f"SLURM_JOB_ID is {job_id}, and Slurm does not show that job ({error.message})"
    if job is None or job.get("JobState") != "RUNNING":
        return f"SLURM_JOB_ID is {job_id}, but that job is not running"
    if not job.get("UserId", "").endswith(f"({os.getuid()})"):
        return f"SLURM_JOB_ID is {job_id}, but that job belongs to another user"
    nodes = job.get("NumNodes", "")
    if nodes.isdecimal() and int(nodes) < spec.nodes:
        # srun itself refuses tasks and GPUs that do not fit.
        return f"resources.nodes is {spec.nodes}, and the allocation, job {job_id}, has {nodes}"
    return None
