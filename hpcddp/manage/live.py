"""Commands and Python stacks inside a running job: ``hpcddp shell`` and ``hpcddp stacks``."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcddp.errors import UserError
from hpcddp.jobfile.job import JobSpec
from hpcddp.manage.status import RunStatus
from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.job_file import read_job_file
from hpcddp.run.job_records import known_hosts
from hpcddp.slurm import commands
from hpcddp.slurm.hostlist import expand
from hpcddp.slurm.job import State
from hpcddp.slurm.job_environment import submission_environment
from hpcddp.task.stacks import ProcessStacks, parse_lines, stacks_of_host


class NotLiveError(UserError):
    """The run has no process now."""

    kind = "not_live"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """A run that holds nodes now.

    Args:
        job_id: the id of Slurm's job that its tasks are in.
        nodes: the nodes of its job in Slurm's order; empty for a run on this machine.
    """

    attempt: AttemptDirectory
    job_id: str
    spec: JobSpec
    nodes: tuple[str, ...]

    def check_rank(self, rank: int) -> None:
        """Reject a rank that the run does not have.

        Raises:
            UserError: there is no such rank.
        """
        if not 0 <= rank < self.spec.world_size:
            last = self.spec.world_size - 1
            ranks = f"ranks 0 to {last}" if last else "rank 0 alone"
            raise UserError(f"--rank is {rank}, and run {self.attempt.run.run_id} has {ranks}; write one of them")

    def node_of(self, rank: int) -> str | None:
        """Return the node of a rank; None for a run on this machine.

        Raises:
            UserError: there is no such rank.
        """
        self.check_rank(rank)
        if not self.nodes:
            return None
        task = rank // (self.spec.world_size // self.spec.tasks)
        hosts = known_hosts(self.attempt)
        # Before the ranks have met: the tasks are distributed in blocks.
        return hosts[task] if task < len(hosts) else self.nodes[task // self.spec.tasks_per_node]


def live_run(status: RunStatus) -> LiveRun:
    """Return a run as one that holds nodes.

    Raises:
        NotLiveError: it does not.
    """
    run = status.run
    job = status.files.job
    state = status.state
    if state is State.SUSPENDED and job is not None:
        raise NotLiveError(
            f"run {run.run_id} is suspended, so its nodes start no process for it; try again when it continues "
            f"(scontrol resume {job.job_id})"
        )
    if job is None or status.files.attempt is None or not state.has_nodes or (status.job is None and not job.local):
        way_out = f"its logs are there: hpcddp logs {run.run_id}"
        if state.has_nodes or state is State.UNKNOWN:
            way_out = "try again in a moment"
        elif state.is_alive:
            way_out = f"wait until it runs (hpcddp why {run.run_id} says what it waits for)"
        raise NotLiveError(f"run {run.run_id} is {state}, so no process of it can be reached; {way_out}")
    attempt = run.attempt(status.files.attempt)
    spec = read_job_file(run)
    nodes = () if status.job is None else tuple(expand(status.job.node_list))
    allocation = None if job.start is None else job.start.allocation
    if allocation is not None:
        # The allocation may have more nodes than the run.
        nodes = tuple(dict.fromkeys(known_hosts(attempt)))
        if not nodes:
            raise NotLiveError(f"the ranks of run {run.run_id} have not met yet; try again in a moment")
    return LiveRun(attempt=attempt, job_id=allocation or job.job_id, spec=spec, nodes=nodes)


def run_inside(
    live: LiveRun, rank: int, command: Sequence[str], environment: Mapping[str, str], *, terminal: bool
) -> int:
    """Run a command on the node of a rank, with the input and output of this process; return its exit code.

    Args:
        environment: that of this process.
        terminal: whether a person sits at a terminal.

    Raises:
        UserError: there is no such rank or program, or no srun here.
    """
    node = live.node_of(rank)
    inherited, _ = submission_environment(environment)
    inherited |= {"HPCDDP_RUN_ID": live.attempt.run.run_id, "HPCDDP_RUN_DIR": str(live.attempt.run.path)}
    if node is None:
        return commands.run_attached(command, inherited)
    job_number = _number_of_job(live, inherited)
    step = commands.overlapping_step(job_number, command, nodes=[node], directory=Path.cwd(), terminal=terminal)
    return commands.run_attached(step, inherited)


def _number_of_job(live: LiveRun, environment: Mapping[str, str]) -> str:
    """Return the job id that srun takes: the number of its own that an element of a job array has."""
    if live.job_id.isdecimal():
        return live.job_id
    job = commands.show_job(live.job_id, environment=environment)
    if job is None:
        raise NotLiveError(
            f"Slurm does not know job {live.job_id} of run {live.attempt.run.run_id} any more; try again"
        )
    return job["JobId"]


def stacks(live: LiveRun, environment: Mapping[str, str]) -> list[ProcessStacks]:
    """Return the Python stacks of all ranks, in their order; the run goes on.

    Args:
        environment: that of this process.

    Raises:
        SlurmUnavailableError: srun is not installed, or Slurm does not start its step.
        SlurmCommandError: srun failed.
    """
    programs = live.spec.command is not None
    if not live.nodes:
        host = socket.gethostname()
        return list(stacks_of_host(str(live.attempt.path), node=None, programs=programs, host=host))
    python = live.spec.environment.interpreter or sys.executable
    command = [python, "-P", "-m", "hpcddp.task.stacks", str(live.attempt.path), *(["--programs"] if programs else [])]
    inherited, _ = submission_environment(environment)
    step = commands.overlapping_step(_number_of_job(live, inherited), command, nodes=live.nodes, directory=Path("/"))
    return parse_lines(commands.step_output(step, inherited).splitlines())
