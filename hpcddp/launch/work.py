"""What a task does, however it was started: meet the other ranks, open the group, train.

``run`` is also the function that submitit pickles: importable, without a closure and without a ``checkpoint`` method.
"""

from __future__ import annotations

import hashlib
import os
import platform
import signal
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcddp import __version__
from hpcddp.errors import HpcddpError
from hpcddp.launch.claim import RunDirectoryError
from hpcddp.launch.rendezvous import PeerFailedError, Rendezvous, meet, raise_if_a_rank_failed
from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.files import read_json
from hpcddp.slurm.rank_env import RankEnv
from hpcddp.spec.write import parse_resolved

if TYPE_CHECKING:
    import torch

_PEER_LOSS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "remote process exited",
    "socket closed",
    "socket timeout",
)


def run(run_directory: str) -> dict[str, Any] | None:
    """Be one rank of the run's current attempt from the first meeting to the last barrier.

    Args:
        run_directory: the run's directory, the same over all attempts; the batch script says which attempt this is.

    Returns:
        The run's result on rank 0, None on the others.
    """
    began = time.monotonic()
    _restore_signals()
    env = RankEnv.from_env(os.environ)
    attempt = AttemptDirectory.from_text(os.environ["HPCDDP_ATTEMPT_DIR"])
    if attempt.run.path != Path(run_directory):
        raise RunDirectoryError(
            f"this task was started for {attempt.run.path}, but the job was submitted for {run_directory}"
        )
    text = attempt.run.job_file.read_text(encoding="utf-8")
    timeout = parse_resolved(text).launch.rendezvous_timeout
    host = own_host()
    meeting = meet(env, attempt, own_host=host, timeout=timeout)
    os.environ.update(env.exports(meeting.address, meeting.port))
    _choose_interfaces(meeting, single_host=env.nodes == 1)
    left = max(1.0, timeout.total_seconds() - (time.monotonic() - began))
    _train(env, attempt, meeting, job_text=text, host=host, rendezvous_timeout=timedelta(seconds=left))
    return read_json(attempt.run.result) if env.rank == 0 else None


def own_host() -> str:
    """Return the name that Slurm has for this host, or its own."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def is_peer_loss(error: BaseException) -> bool:
    """Return whether ``error`` only says that another rank has gone."""
    if isinstance(error, HpcddpError) and not isinstance(error, PeerFailedError):
        # It names a cause of its own: a data set that cannot reach its server is no rank that has gone.
        return False
    return any(
        isinstance(link, PeerFailedError) or any(phrase in str(link).lower() for phrase in _PEER_LOSS)
        for link in _chain(error)
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _restore_signals() -> None:
    """Undo the handlers that submitit has just installed: TERM ends the process, the warning signal waits."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCONT, signal.SIG_DFL)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


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
    from hpcddp.train.job import TrainContext, run_training

    spec = parse_resolved(job_text)
    device = distributed.choose_device(env, spec.device)
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
    ):
        run_training(
            TrainContext(
                spec=spec,
                rank=env.rank,
                local_rank=env.local_rank,
                world_size=env.world_size,
                device=device,
                run=attempt.run,
                attempt=attempt.number,
                threads=threads,
            )
        )


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
