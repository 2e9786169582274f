"""The process group of a training, from its opening to its end, and what the ranks of a group share."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import ClassVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not marked so

from hpcddp.errors import HpcddpError, UserError
from hpcddp.slurm.rank_env import RankEnv
from hpcddp.stop.heartbeat import Heartbeat
from hpcddp.stop.reasons import ExitCode
from hpcddp.vendors import vendor_of_torch

_TEARDOWN_TIMEOUT = timedelta(seconds=30)
_GROUP_FACTOR = 2


class DeviceError(HpcddpError):
    """The device of this rank does not exist."""

    kind = "device"
    exit_code: ClassVar[int] = ExitCode.USER_CODE


def choose_device(env: RankEnv, kind: str) -> torch.device:
    """Return the device of this rank and make it the current one.

    The index is 0 if the process sees one device, else the local rank.

    Args:
        kind: ``cuda`` or ``cpu``.

    Raises:
        DeviceError: the process sees no GPU, or not as many as its local rank needs.
    """
    if kind == "cpu":
        return torch.device("cpu")
    host = socket.gethostname()
    if not torch.cuda.is_available():
        vendor = vendor_of_torch(vars(torch.version))
        reason = "its torch is built for CPUs only"
        if vendor is not None:
            reason = vendor.explain_no_gpu(os.environ)
        raise DeviceError(
            f"rank {env.rank} on {host} sees no GPU, but the job asks for GPUs; {reason}; "
            "ask for a node with GPUs, or set train.device: cpu to run the same job on CPUs"
        )
    visible = torch.cuda.device_count()
    index = 0 if visible == 1 else env.local_rank
    if index >= visible:
        raise DeviceError(
            f"rank {env.rank} on {host} has local rank {env.local_rank} but sees {visible} GPUs; "
            "ask for as many GPUs per node as tasks per node"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def gpu_uuid(device: torch.device) -> str | None:
    """Return the UUID of the GPU behind ``device``, or None for a CPU."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).uuid)
    return None


@contextlib.contextmanager
def process_group(
    env: RankEnv,
    *,
    address: str,
    port: int,
    listener: socket.socket | None,
    device: torch.device,
    rendezvous_timeout: timedelta,
    hang_timeout: timedelta,
) -> Iterator[None]:
    """Open the default process group with all ranks, which have met, and close it after the block.

    Args:
        address: rank 0's host.
        port: the port that rank 0 listens on.
        listener: rank 0's listening socket, handed over to the store; None on the other ranks.
        device: this rank's device: NCCL on a GPU, gloo on a CPU.
        rendezvous_timeout: how long to wait for rank 0's store.
        hang_timeout: how long a rank may make no progress. The timeout of collectives is longer, so that the watchdogs
            of the ranks, which report more, act first.

    Raises:
        RuntimeError: an error of torch, such as a connection that was lost.
    """
    timeout = _GROUP_FACTOR * timedelta(seconds=Heartbeat(hang_timeout.total_seconds()).first_timeout_s)
    store = _open_store(env, address, port, listener, rendezvous_timeout)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=store,
        rank=env.rank,
        world_size=env.world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    yield
    # Only after success: after an exception no collective may be entered, and the process ends at once.
    dist.barrier()
    with _exit_after(_TEARDOWN_TIMEOUT):
        dist.destroy_process_group()


@contextlib.contextmanager
def _exit_after(timeout: timedelta) -> Iterator[None]:
    """Exit with success if the block hangs: every rank has passed the last barrier, and all files are written."""
    timer = threading.Timer(timeout.total_seconds(), _exit_with_success)
    timer.daemon = True
    timer.start()
    yield
    timer.cancel()


def _exit_with_success() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ExitCode.FINISHED)


def _open_store(env: RankEnv, address: str, port: int, listener: socket.socket | None, timeout: timedelta) -> TCPStore:
    if listener is None:
        return TCPStore(address, port, None, is_master=False, timeout=timeout, wait_for_workers=False)
    # The store closes the descriptor itself; without detach() Python would close it a second time.
    return TCPStore(
        address,
        port,
        env.world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def collective_trace() -> str | None:
    """Return the trace of the newest collectives of this process as JSON, from torch's flight recorder.

    Returns:
        None without a process group, and if this torch has no recorder for its backend.
    """
    if not dist.is_initialized():
        return None
    name = "_dump_nccl_trace_json" if dist.get_backend() == "nccl" else "_dump_fr_trace_json"
    # Some builds of torch have only one of the two; neither is public.
    dump: Callable[[], bytes] | None = getattr(torch._C._distributed_c10d, name, None)  # noqa: SLF001
    return None if dump is None else dump().decode()


# Set by torchrun and by srun. The variables of sbatch do not count: the batch script itself has them.
_COUNTS = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


class NoGroupError(UserError):
    """Several processes have been started, and no process group is open."""

    kind: ClassVar[str] = "no_group"


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """Return the number of ranks of a group, None = the default one; 1 where no process group is open."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def rank(group: dist.ProcessGroup | None = None) -> int:
    """Return this process's rank in a group, None = the default one; 0 where no process group is open."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def broadcast_numbers(numbers: Sequence[int]) -> list[int]:
    """Return rank 0's numbers on every rank; every rank passes equally many."""
    if not dist.is_initialized():
        return list(numbers)
    tensor = torch.tensor(list(numbers), dtype=torch.int64, device=collective_device())
    dist.broadcast(tensor, src=0)
    return [int(number) for number in tensor.tolist()]


def collective_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device of tensors for a group's collectives: the current GPU if it uses NCCL, else the CPU."""
    if dist.is_initialized() and dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def refuse_without_group(environment: Mapping[str, str]) -> None:
    """Refuse to work without a process group if several processes have been started.

    Raises:
        NoGroupError: several processes have been started, and no process group is open.
    """
    if dist.is_initialized():
        return
    for name in _COUNTS:
        count = environment.get(name, "")
        if count.isdecimal() and int(count) > 1:
            raise NoGroupError(
                f"{name} is {count}, so that {count} processes have been started, but no process group is open, and "
                "each would run as the only rank; call torch.distributed.init_process_group first"
            )
