"""What a task does, however it was started: meet the other ranks, open the group, train.

``run`` is also the function that submitit pickles: importable, without a closure and without a ``checkpoint`` method.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcddp import __version__
from hpcddp.launch.claim import RunDirectoryError
from hpcddp.launch.lifeline import LIFELINE, leave, own_host
from hpcddp.launch.program import run_program
from hpcddp.launch.program_environment import program_environment
from hpcddp.launch.rendezvous import Rendezvous, meet, raise_if_a_rank_failed
from hpcddp.launch.roll_call import report, wait_for_all
from hpcddp.launch.watchdog import watch
from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.files import read_json, write_json
from hpcddp.run.sweep import is_element
from hpcddp.slurm.rank_env import RankEnv
from hpcddp.spec.job import JobSpec
from hpcddp.spec.write import parse_resolved
from hpcddp.stop.deadline import Deadline
from hpcddp.stop.exit_codes import ExitCode
from hpcddp.stop.heartbeat import Heartbeat
from hpcddp.stop.reasons import StopReason
from hpcddp.stop.signals import LISTENER

if TYPE_CHECKING:
    import torch


def run(run_directory: str) -> dict[str, Any] | None:
    """Be one rank of the run's current attempt from the first meeting to the last barrier.

    Args:
        run_directory: the run's directory, or that of the sweep that it is an element of, the same over all attempts;
            the batch script says which attempt this is.

    Returns:
        The run's result on rank 0, None on the others.
    """
    began = time.monotonic()
    LISTENER.reinstall()
    env = RankEnv.from_env(os.environ)
    attempt = AttemptDirectory.from_text(os.environ["HPCDDP_ATTEMPT_DIR"])
    submitted = Path(run_directory)
    if attempt.run.path != submitted and not is_element(attempt.run.path, submitted):
        raise RunDirectoryError(
            f"this task was started for {attempt.run.path}, but the job was submitted for {run_directory}"
        )
    text = attempt.run.job_file.read_text(encoding="utf-8")
    spec = parse_resolved(text)
    timeout = spec.launch.rendezvous_timeout
    host = own_host()
    meeting = meet(env, attempt, own_host=host, timeout=timeout)
    _choose_interfaces(meeting, single_host=env.nodes == 1)
    left = timedelta(seconds=max(1.0, timeout.total_seconds() - (time.monotonic() - began)))
    if spec.command is not None:
        # Whoever reports has found rank 0 and needs its port no more.
        report(env, attempt, host=host)
        _run_command(spec, env, attempt, meeting, timeout=left)
        return None
    os.environ.update(env.exports(meeting.address, meeting.port))
    _train(env, attempt, meeting, job_text=text, host=host, rendezvous_timeout=left)
    return read_json(attempt.run.result) if env.rank == 0 else None


def _run_command(
    spec: JobSpec, env: RankEnv, attempt: AttemptDirectory, meeting: Rendezvous, *, timeout: timedelta
) -> None:
    if meeting.listener is not None:
        wait_for_all(env, attempt, timeout=timeout)
        # The program of rank 0 binds it again, in a moment; its peers try until it does.
        meeting.listener.close()
    end_time = _deadline(attempt).end_time
    variables = program_environment(
        spec,
        env,
        attempt,
        address=meeting.address,
        port=meeting.port,
        end_time=end_time,
        inherited=os.environ,
        python=Path(sys.executable),
    )
    run_program(spec, env, attempt, variables=variables, end_time=end_time)


def _choose_interfaces(meeting: Rendezvous, *, single_host: bool) -> None:
    """Tell gloo and NCCL the interface that leads to rank 0, unless the user chose one.

    Gloo would otherwise take the address of this host's own name, which /etc/hosts often gives as 127.0.1.1.
    """
    interface = "lo" if single_host else meeting.interface
    if interface is None:
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if not single_host:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def _train(
    env: RankEnv,
    attempt: AttemptDirectory,
    meeting: Rendezvous,
    *,
    job_text: str,
    host: str,
    rendezvous_timeout: timedelta,
) -> None:
    import torch

    from hpcddp.train import distributed
    from hpcddp.train.entry import run_entrypoint
    from hpcddp.train.errors import StoppedError
    from hpcddp.train.job import TrainContext, run_training

    spec = parse_resolved(job_text)
    device = distributed.choose_device(env, spec.device)
    LIFELINE.device = str(device)
    threads = int(os.environ["OMP_NUM_THREADS"])
    torch.set_num_threads(threads)
    identity = _identity(host, job_text, attempt, gpu=distributed.gpu_uuid(device), torch_version=torch.__version__)
    with distributed.process_group(
        env,
        address=meeting.address,
        port=meeting.port,
        token=meeting.token,
        listener=meeting.listener,
        identity=identity,
        device=device,
        rendezvous_timeout=rendezvous_timeout,
        hang_timeout=spec.launch.hang_timeout,
        watch=lambda: raise_if_a_rank_failed(attempt),
    ) as ranks:
        if env.rank == 0:
            write_json(attempt.ranks, [{"host": rank["host"], "gpu": rank["gpu"]} for rank in ranks])
        context = TrainContext(
            spec=spec,
            rank=env.rank,
            local_rank=env.local_rank,
            world_size=env.world_size,
            device=device,
            run=attempt.run,
            attempt=attempt.number,
            threads=threads,
            should_stop=_why_to_stop,
            cause=LIFELINE.cause,
            deadline=_deadline(attempt),
            heartbeat=_heartbeat(spec, attempt, world_size=env.world_size),
        )
        if spec.entrypoint is not None:
            run_entrypoint(context, env)
            return
        try:
            run_training(context)
        except StoppedError:
            # Neither a result nor a failure. submitit, which may have called this, must not make one of it.
            leave(ExitCode.STOPPED)


def _heartbeat(spec: JobSpec, attempt: AttemptDirectory, *, world_size: int) -> Heartbeat:
    """Return what takes the signs of life; a function of the user's own gives none between its steps."""
    if spec.entrypoint is not None:
        return Heartbeat()
    return watch(attempt, spec.launch.hang_timeout, world_size=world_size)


def _why_to_stop() -> StopReason:
    """Return what this process was told. It is asked before each step: a stop is the ranks' own from now on."""
    LIFELINE.train()
    return LISTENER.reason()


def _deadline(attempt: AttemptDirectory) -> Deadline:
    """Return the end of the job, as the batch script has found it."""
    start = read_json(attempt.start) or {}
    end_time = start.get("end_time")
    return Deadline(end_time=None if end_time is None else float(end_time), start_time=float(start.get("time", 0.0)))


def _identity(
    host: str,
    job_text: str,
    attempt: AttemptDirectory,
    *,
    gpu: str | None,
    torch_version: torch.torch_version.TorchVersion,
) -> Any:  # noqa: ANN401
    from hpcddp.train.distributed import Identity

    return Identity(
        host=host,
        hpcddp=__version__,
        python=platform.python_version(),
        torch=str(torch_version),
        job=hashlib.sha256(job_text.encode()).hexdigest(),
        attempt=attempt.number,
        gpu=gpu,
    )
