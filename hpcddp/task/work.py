"""The work of a task: rendezvous with the other ranks, then the user's command or the training.

``run`` is also the function that submitit pickles: it is importable, has no closure and no ``checkpoint`` method.
"""

from __future__ import annotations

import gc
import hashlib
import math
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Any, Final

from hpcddp.errors import HpcddpError, UserError, counted, printable
from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.launchers import OWN, World
from hpcddp.jobfile.placeholders import fill_run_placeholders
from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.files import is_full
from hpcddp.run.job_records import Rank, read_start, write_ranks
from hpcddp.run.metrics_log import METRICS_FILE
from hpcddp.run.ownership import RunDirectoryError
from hpcddp.run.result import read_result
from hpcddp.run.sweep import is_element
from hpcddp.slurm.job import ask_end, slurm_job_id
from hpcddp.slurm.job_environment import submitters_umask
from hpcddp.stop.deadline import Deadline, KnownEnd
from hpcddp.stop.heartbeat import Heartbeat
from hpcddp.stop.listener import LISTENER, write_to_stderr
from hpcddp.stop.reasons import ExitCode, StopReason
from hpcddp.task.attribution import failure_record, failure_text, is_peer_loss, save_failure
from hpcddp.task.code import check_imports
from hpcddp.task.local_peers import exit_after_failure
from hpcddp.task.process_state import PROCESS_STATE, TaskInputs, exit_process
from hpcddp.task.program import ProgramEnding, program_environment, run_program
from hpcddp.task.rendezvous import Identity, Rendezvous, RendezvousError, meet
from hpcddp.task.watchdog import start_watchdog, trace_variables
from hpcddp.version import __version__

if TYPE_CHECKING:
    import torch


def run_rank(inputs: TaskInputs) -> None:
    """Run one rank of the job's training or entrypoint, from the rendezvous to the last barrier."""
    # Garbage collections take a tenth of the time of these imports, and free nothing: then or later.
    gc.disable()
    # Before torch, because it says what is missing.
    from hpcddp.train import distributed  # isort: split

    import torch

    # The first step needs them all.
    import hpcddp.train.entry
    import hpcddp.train.loop.job  # noqa: F401  see above

    gc.freeze()
    gc.enable()
    env = inputs.env
    attempt = inputs.attempt
    device = distributed.choose_device(env, inputs.spec.device)
    PROCESS_STATE.device = str(device)
    torch.set_num_threads(int(inputs.environment["OMP_NUM_THREADS"]))
    identity = Identity(
        host=PROCESS_STATE.host,
        gpu=distributed.gpu_uuid(device),
        must_agree={
            "hpcddp": __version__,
            "Python": platform.python_version(),
            "torch": str(torch.__version__),
            "the job file (sha256)": hashlib.sha256(inputs.job_text.encode()).hexdigest(),
            "attempt": str(attempt.number),
        },
    )
    meeting = meet_ranks(inputs, identity)
    inputs.environment.update(env.exports(meeting.address, meeting.port))
    PROCESS_STATE.collective_trace = distributed.collective_trace
    inputs.environment.update(trace_variables(attempt, inputs.environment))
    _train_together(inputs, meeting, device)


def _train_together(inputs: TaskInputs, meeting: Rendezvous, device: torch.device) -> None:
    """Open the process group with the ranks that have met, and train or call the entrypoint."""
    from hpcddp.train.context import TrainContext
    from hpcddp.train.distributed import process_group
    from hpcddp.train.entry import run_entrypoint
    from hpcddp.train.errors import StoppedError
    from hpcddp.train.loop.job import run_training

    spec = inputs.spec
    attempt = inputs.attempt
    heartbeat = _heartbeat(spec, attempt, world_size=inputs.env.world_size)
    group = process_group(
        inputs.env,
        address=meeting.address,
        port=meeting.port,
        listener=meeting.listener,
        device=device,
        rendezvous_timeout=spec.launch.rendezvous_timeout,
        hang_timeout=spec.launch.hang_timeout,
    )
    with ExitStack() as stack:
        with opening(attempt, spec.launch.rendezvous_timeout):
            stack.enter_context(group)
        context = TrainContext(
            spec=spec,
            rank_env=inputs.env,
            device=device,
            run=attempt.run,
            attempt=attempt.number,
            threads=int(inputs.environment["OMP_NUM_THREADS"]),
            stop_reason=_begin_and_get_stop_reason,
            cause=PROCESS_STATE.cause,
            deadline=deadline_of(attempt),
            ask_end=_ask_end(inputs.environment),
            heartbeat=heartbeat,
        )
        if spec.entrypoint is not None:
            variables = {METRICS_FILE: str(attempt.run.metrics), "HPCDDP_ATTEMPT": str(attempt.number)}
            inputs.environment.update(variables)
            # Before the function is called: nobody sees the steps that it makes until it asks whether to stop.
            PROCESS_STATE.start_training()
            run_entrypoint(context)
            return
        try:
            run_training(context)
        except StoppedError:
            # A stop is neither a result nor a failure: submitit, which may have called this function, must record none.
            exit_process(ExitCode.STOPPED)


@contextmanager
def opening(attempt: AttemptDirectory, timeout: timedelta) -> Iterator[None]:
    """Limit the time in which the process group opens, and report an error of torch there as one of the network.

    Most of it is one call of torch's, which may not return, whatever its own timeouts are.

    Args:
        timeout: ends the process, with a failure record.

    Raises:
        RendezvousError: torch could not open the process group.
    """
    timer = Timer(timeout.total_seconds(), _give_up, (attempt, timeout))
    timer.daemon = True
    timer.start()
    try:
        yield
    except Exception as error:
        if is_peer_loss(error):
            raise
        # A changed value in torch's store can cause any error: gloo may read it as a size that it cannot allocate.
        reason = printable(next(iter(str(error).splitlines()), type(error).__name__))
        raise RendezvousError(f"the ranks have met, but torch could not open their process group: {reason}") from error
    finally:
        timer.cancel()


def _give_up(attempt: AttemptDirectory, timeout: timedelta) -> None:
    error = RendezvousError(
        f"the ranks have met, but torch did not open their process group within {timeout.total_seconds():.0f} s; look "
        "at the network between the hosts, or raise launch.rendezvous_timeout"
    )
    record = failure_record(error)
    save_failure(attempt, record)
    write_to_stderr(failure_text(record))
    exit_after_failure(record.exit_code, attempt)


def _heartbeat(spec: JobSpec, attempt: AttemptDirectory, *, world_size: int) -> Heartbeat:
    """Return the heartbeat of the training; an entrypoint has no watchdog, because it reports no steps."""
    if spec.entrypoint is not None:
        return Heartbeat()
    return start_watchdog(attempt, spec.launch.hang_timeout, world_size=world_size)


def _begin_and_get_stop_reason() -> StopReason:
    """Return why this rank is to stop, and record that the training has begun.

    It is called when this rank votes: near the end of a step, and between batches of an evaluation.

    Does not return in a process that is about to exit.
    """
    PROCESS_STATE.start_training()
    return LISTENER.reason()


def _ask_end(environment: Mapping[str, str]) -> Callable[[], KnownEnd | None] | None:
    job_id = slurm_job_id(environment)
    return None if job_id is None else lambda: ask_end(job_id)


def meet_ranks(inputs: TaskInputs, identity: Identity) -> Rendezvous:
    """Meet the other ranks, and record where all of them run."""
    spec = inputs.spec
    attempt = inputs.attempt
    identity = replace(identity, binding=inputs.binding)
    meeting = meet(inputs.env, attempt, identity, timeout=spec.launch.rendezvous_timeout)
    choose_interfaces(inputs, meeting.interface)
    if inputs.env.rank == 0:
        launcher = None if spec.launcher_command is None else spec.launcher_command.launcher
        ranks = [
            Rank(host=rank.host, gpu=rank.gpu, launcher=launcher, binding=rank.binding) for rank in meeting.identities
        ]
        try:
            write_ranks(attempt, ranks)
        except OSError as error:
            # The record of some hundred ranks is larger than a reserve file; only people read it.
            if not is_full(error):
                raise
            write_to_stderr(f"hpcddp: {attempt.ranks} cannot be written ({error.strerror})\n")
    return meeting


def choose_interfaces(inputs: TaskInputs, leads_to_others: str | None) -> None:
    """Set the network interface for gloo and NCCL, unless the user chose one.

    Otherwise gloo takes the address of this host's own name, which /etc/hosts often gives as 127.0.1.1.

    Args:
        inputs: what the task read; its environment is changed.
        leads_to_others: the interface of this host that leads to the other hosts; None if it is not known.
    """
    single_host = inputs.env.nodes == 1
    interface = "lo" if single_host else leads_to_others
    if interface is None:
        return
    inputs.environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    if not single_host:
        inputs.environment.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def deadline_of(attempt: AttemptDirectory) -> Deadline:
    """Return the end of the job as the batch script recorded it."""
    start = read_start(attempt)
    if start is None:
        return Deadline(end_time=None, start_time=0.0)
    return Deadline(end_time=start.end_time, start_time=start.time)


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
    if spec.environment.code == "snapshot" and env.rank == 0:
        check_imports(attempt.run, sys.executable, inputs.environment)
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
        check_imports(attempt.run, command[0], environment)
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


def _start_trackers(inputs: TaskInputs) -> Callable[[ProgramEnding], None]:
    """Start the trackers that the job of a command names, on rank 0; return what to call when the program has ended."""
    if inputs.env.rank or not inputs.spec.trackers.use:
        return lambda _: None
    from hpcddp.train.tracking.opening import start_trackers
    from hpcddp.train.tracking.protocol import AttemptEnding

    def print_line(text: str) -> None:
        write_to_stderr(f"hpcddp: {text}\n")

    tracking = start_trackers(inputs.spec, inputs.attempt, first_step=None, print_line=print_line)

    def end(ending: ProgramEnding) -> None:
        most_s = math.inf if ending == "finished" else _TRACKERS_AFTER_STOP_S
        tracking.end(AttemptEnding[ending.upper()], most_s=most_s)

    return end
