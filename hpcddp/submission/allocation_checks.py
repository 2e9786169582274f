"""The checks of a job that is to run in the allocation of this shell, as inside ``salloc``."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from hpcddp.errors import counted
from hpcddp.jobfile.cluster import Cluster
from hpcddp.jobfile.job import JobSpec
from hpcddp.slurm import commands
from hpcddp.slurm.directives import request_of
from hpcddp.slurm.hostlist import HostListError, expand
from hpcddp.submission.request import Obstacle

# srun numbers its steps from 0; the steps of a batch script and of salloc's own shell have the numbers above.
_LARGEST_STEP: Final = 0xFFFFFFF0
# One line for each group of nodes with the same resources (scontrol show job --details).
_NODES = re.compile(r"^\s*Nodes=(?P<nodes>\S+) CPU_IDs=(?P<cpus>\S*) Mem=\S* GRES=(?P<gres>\S*)", re.MULTILINE)
# The indices of the devices, which hold commas.
_INDICES = re.compile(r"\(.*?\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCapacity:
    """What an allocation has of one node.

    Args:
        cpus: CPUs, as Slurm counts them.
    """

    cpus: int
    gpus: int


def capacities_of(details: str) -> list[NodeCapacity]:
    """Return what a job has of each of its nodes.

    Args:
        details: the output of ``scontrol show job --details``.

    Raises:
        HostListError: the output has another form.
    """
    capacities: list[NodeCapacity] = []
    for line in _NODES.finditer(details):
        cpus = len(expand(f"[{line['cpus']}]"))
        kinds = (kind for kind in _INDICES.sub("", line["gres"]).split(",") if kind.startswith("gpu:"))
        counts = (kind.rpartition(":")[2] for kind in kinds)
        gpus = sum(int(count) for count in counts if count.isdecimal())
        capacities += [NodeCapacity(cpus=cpus, gpus=gpus)] * len(expand(line["nodes"]))
    return capacities


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
        details = commands.show_job_details(job_id, environment=environment)
    except commands.SlurmCommandError as error:
        return f"SLURM_JOB_ID is {job_id}, and Slurm does not show that job ({error.message})"
    job = {} if details is None else commands.parse_job(details)
    if details is None or job.get("JobState") != "RUNNING":
        return f"SLURM_JOB_ID is {job_id}, but that job is not running"
    if not job.get("UserId", "").endswith(f"({os.getuid()})"):
        return f"SLURM_JOB_ID is {job_id}, but that job belongs to another user"
    try:
        capacities = capacities_of(details)
    except HostListError:
        # srun itself refuses what does not fit.
        return None
    return _too_small(spec, job_id, capacities) if capacities else None


def _too_small(spec: JobSpec, job_id: str, capacities: list[NodeCapacity]) -> str | None:
    """Return which resource of the allocation is too small for the job, in words; None if each is large enough."""
    nodes = spec.nodes
    gpus = spec.resources.gpus_per_node if spec.uses_gpus else 0
    cpus = spec.tasks_per_node * spec.cpus_per_task
    if len(capacities) < nodes:
        return f"resources.nodes is {nodes}, and the allocation, job {job_id}, has {len(capacities)}"
    for name, needed, of_each_node in (
        ("GPU", gpus, [node.gpus for node in capacities]),
        ("CPU", cpus, [node.cpus for node in capacities]),
    ):
        large_nodes = sum(amount >= needed for amount in of_each_node)
        if large_nodes < nodes:
            where = "its node" if nodes == 1 else f"each of {nodes} nodes"
            offer = f"at most {max(of_each_node)} on a node"
            if large_nodes > 0:
                offer = f"that many on only {counted(large_nodes, 'node')}"
            return f"the job needs {counted(needed, name)} on {where}, and the allocation, job {job_id}, has {offer}"
    return None
