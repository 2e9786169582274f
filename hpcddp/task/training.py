"""The training or the entrypoint of a task, from the meeting of the ranks to the last barrier."""

from __future__ import annotations

import gc
import hashlib
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from threading import Timer
from typing import TYPE_CHECKING

from hpcddp.errors import printable
from hpcddp.jobfile.job import JobSpec
from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.metrics_log import METRICS_FILE
from hpcddp.slurm.job import ask_end, slurm_job_id
from hpcddp.stop.deadline import KnownEnd
from hpcddp.stop.heartbeat import Heartbeat
from hpcddp.stop.listener import LISTENER, write_to_stderr
from hpcddp.stop.reasons import ExitCode, StopReason
from hpcddp.task.attribution import failure_record, failure_text, is_peer_loss, save_failure
from hpcddp.task.local_peers import exit_after_failure
from hpcddp.task.meeting import deadline_of, meet_ranks
from hpcddp.task.process_state import PROCESS_STATE, TaskInputs, exit_process
from hpcddp.task.rendezvous import Identity, Rendezvous, RendezvousError
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
