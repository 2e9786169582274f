"""The work of a task: rendezvous with the other ranks, then the user's command or the training.

``run`` is also the function that submitit pickles: it is importable, has no closure and no ``checkpoint`` method.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hpcddp.errors import HpcddpError, UserError, counted
from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.launchers import OWN, World
from hpcddp.jobfile.placeholders import fill_run_placeholders
from hpcddp.run.directory import RunDirectory
from hpcddp.run.ownership import RunDirectoryError
from hpcddp.run.result import read_result
from hpcddp.run.sweep import is_element
from hpcddp.slurm.job_environment import submitters_umask
from hpcddp.stop.listener import LISTENER, write_to_stderr
from hpcddp.task.code import check_program
from hpcddp.task.meeting import deadline_of, meet_ranks
from hpcddp.task.process_state import PROCESS_STATE, TaskInputs
from hpcddp.task.program import ProgramEnding, program_environment, run_program
from hpcddp.task.rendezvous import Identity
from hpcddp.task.training import run_rank

# What a launcher sets for each of the ranks that it starts.
_VARIABLES_OF_A_RANK: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
# srun's numbers of its tasks. Tasks with a launcher count nodes, and programs that know Slurm take them for ranks.
_NUMBERS_OF_A_TASK: Final = (
    "SLURM_PROCID", "SLURM_LOCALID", "SLURM_GTIDS", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS",
    "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE",
)  # fmt: skip


class NotATaskError(HpcddpError):
    """The function of the pickle was called in a process that is not a task."""

    kind = "not_a_task"


class NumberOfTasksError(UserError):
    """The script starts another number of tasks than its job has."""

    kind = "number_of_tasks"


def run(run_directory: str) -> dict[str, Any] | None:
    """Run one rank of the run's current attempt, from the rendezvous to the last barrier.

    Args:
        run_directory: the directory of the run, or of the sweep that the run is an element of; it is the same in all
            attempts. The environment that the batch script sets names the attempt.

    Returns:
        The run's result on rank 0, None on the other ranks.
    """
    LISTENER.reinstall()
    inputs = PROCESS_STATE.inputs
    if inputs is None:
        raise NotATaskError("hpcddp.task.work.run was called outside of a task; start tasks with python -m hpcddp.task")
    env = inputs.env
    attempt = inputs.attempt
    spec = inputs.spec
    submitted = Path(run_directory)
    if attempt.run.path != submitted and not is_element(attempt.run.path, submitted):
        raise RunDirectoryError(
            f"this task was started for {attempt.run.path}, but the job was submitted for {run_directory}"
        )
    if env.world_size != spec.tasks:
        raise NumberOfTasksError(
            f"the script starts {counted(env.world_size, 'task')}, and the job in it has {spec.tasks} "
            f"(resources.nodes {spec.nodes} x resources.tasks_per_node {spec.tasks_per_node}); render the script "
            "again, or change the numbers of its directives, its srun and its job together"
        )
    if spec.command is not None:
        _run_command(inputs)
        return None
    with submitters_umask(inputs.environment):
        run_rank(inputs)
    if env.rank != 0:
        return None
    result = read_result(attempt.run)
    return None if result is None else result.as_json()


def _run_command(inputs: TaskInputs) -> None:
    spec = inputs.spec
    env = inputs.env
    attempt = inputs.attempt
    meeting = meet_ranks(inputs, Identity(host=PROCESS_STATE.host))
    if meeting.listener is not None:
        # The program of rank 0 binds the port again; its peers retry until it does.
        meeting.listener.close()
    deadline = deadline_of(attempt)
    variables = program_environment(
        spec,
        env,
        attempt,
        address=meeting.address,
        port=meeting.port,
        end_time=deadline.end_time,
        inherited=inputs.environment,
        python=Path(sys.executable),
    )
    environment = {**inputs.environment, **variables}
    command = spec.command or ()
    if spec.launcher_command is not None:
        for name in _VARIABLES_OF_A_RANK:
            environment.pop(name)
        if spec.launcher_command.launcher != OWN:
            for name in _NUMBERS_OF_A_TASK:
                environment.pop(name, None)
        world = World(
            nodes=env.nodes,
            node_rank=env.node_rank,
            ranks_per_node=spec.ranks_per_node,
            address=meeting.address,
            port=meeting.port,
            name=f"{attempt.run.run_id}-{attempt.number}",
            environment=environment,
        )
        command = spec.launcher_command.in_world(world)
    command = fill_run_placeholders(command, environment)
    if spec.environment.code == "snapshot" and env.rank == 0:
        check_program(attempt.run, command, environment)
    on_end = _start_trackers(inputs)
    with submitters_umask(inputs.environment):
        run_program(
            spec,
            env,
            attempt,
            command=command,
            environment=environment,
            port=meeting.port,
            deadline=deadline,
            on_end=on_end,
        )


# A stopped program may have used up its time, and the requeue needs some.
_TRACKERS_AFTER_STOP_S: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _CommandRun:
    """The run of a command, for its trackers."""

    spec: JobSpec
    run: RunDirectory
    attempt: int
    is_main: bool

    def print_on_rank_0(self, text: str) -> None:
        """Print one line."""
        write_to_stderr(f"hpcddp: {text}\n")


def _start_trackers(inputs: TaskInputs) -> Callable[[ProgramEnding], None]:
    """Start the trackers that the job of a command names, on rank 0; return what to call when the program has ended."""
    if inputs.env.rank or not inputs.spec.trackers.use:
        return lambda _: None
    from hpcddp.train.tracking.opening import start_trackers
    from hpcddp.train.tracking.protocol import AttemptEnding

    run = _CommandRun(spec=inputs.spec, run=inputs.attempt.run, attempt=inputs.attempt.number, is_main=True)
    tracking = start_trackers(run, first_step=None)

    def end(ending: ProgramEnding) -> None:
        most_s = math.inf if ending == "finished" else _TRACKERS_AFTER_STOP_S
        tracking.end(AttemptEnding[ending.upper()], most_s=most_s)

    return end
