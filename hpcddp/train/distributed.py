"""Open and close the default process group; errors name the ranks that are missing or differ."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # public, not marked so

from hpcddp.errors import HpcddpError, UserError
from hpcddp.slurm.rank_env import RankEnv
from hpcddp.stop.heartbeat import Heartbeat
from hpcddp.stop.reasons import ExitCode

_POLL_S = 0.05
# How long the other ranks may take to read rank 0's verdict.
_VERDICT_GRACE = timedelta(seconds=30)
_TEARDOWN_TIMEOUT = timedelta(seconds=30)
_GROUP_FACTOR = 2
# Ranks that one error names.
_MOST_NAMED = 16


class MissingRankError(HpcddpError):
    """Some ranks did not start within the rendezvous timeout."""

    kind = "missing_rank"
    exit_code: ClassVar[int] = ExitCode.INFRASTRUCTURE


class DisagreementError(HpcddpError):
    """The ranks differ in version, job file or attempt, or two of them share a GPU."""

    kind = "disagreement"
    exit_code: ClassVar[int] = ExitCode.USER_CODE


class DeviceError(HpcddpError):
    """The device of this rank does not exist."""

    kind = "device"
    exit_code: ClassVar[int] = ExitCode.USER_CODE


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Host and GPU of a rank, and the versions and the job that must be the same on all ranks.

    Args:
        job: sha256 of the resolved job file as this rank read it.
        gpu: UUID of the GPU; None on a CPU.
    """

    host: str
    hpcddp: str
    python: str
    torch: str
    job: str
    attempt: int
    gpu: str | None


_MUST_AGREE = {
    "hpcddp": "hpcddp",
    "python": "Python",
    "torch": "torch",
    "job": "the job file (sha256)",
    "attempt": "attempt",
}


def choose_device(env: RankEnv, kind: str) -> torch.device:
    """Return the device of this rank and make it the current one.

    The index is 0 if the process sees one device, else the local rank.

    Args:
        env: this rank.
        kind: ``cuda`` or ``cpu``.

    Raises:
        DeviceError: the process sees no GPU, or not as many as its local rank needs.
    """
    if kind == "cpu":
        return torch.device("cpu")
    host = socket.gethostname()
    if not torch.cuda.is_available():
        raise DeviceError(
            f"rank {env.rank} on {host} sees no CUDA device, but the job asks for GPUs; "
            "ask for a node with GPUs, or set train.device: cpu to run the same job on CPUs"
        )
    visible = torch.cuda.device_count()
    index = 0 if visible == 1 else env.local_rank
    if index >= visible:
        raise DeviceError(
            f"rank {env.rank} on {host} has local rank {env.local_rank} but sees {visible} CUDA devices; "
            "ask for as many GPUs per node as tasks per node"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def gpu_uuid(device: torch.device) -> str | None:
    """Return the UUID of the GPU behind ``device``, or None for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


@contextlib.contextmanager
def process_group(
    env: RankEnv,
    *,
    address: str,
    port: int,
    token: str,
    listener: socket.socket | None,
    identity: Identity,
    device: torch.device,
    rendezvous_timeout: timedelta,
    hang_timeout: timedelta,
    watch: Callable[[], None],
) -> Iterator[list[dict[str, Any]]]:
    """Open the default process group with all ranks, and close it after the block.

    Args:
        env: this rank.
        address: rank 0's host.
        port: the port that rank 0 listens on.
        token: prefix of this attempt's keys in the store, so that another attempt's keys never mix with them.
        listener: rank 0's listening socket, handed over to the store; None on the other ranks.
        identity: what must agree on all ranks.
        device: this rank's device: NCCL on a GPU, gloo on a CPU.
        rendezvous_timeout: how long to wait for the ranks.
        hang_timeout: how long a rank may make no progress. The timeout of collectives is longer, so that the watchdogs
            of the ranks, which report more, act first.
        watch: called while waiting; raises if a rank is known to have failed.

    Yields:
        The identities of all ranks by rank, on rank 0; an empty list on the others.

    Raises:
        MissingRankError: names the missing ranks and their hosts.
        DisagreementError: names the rank that differs, or the two ranks on one GPU.
    """
    store = PrefixStore(token, _open_store(env, address, port, listener, rendezvous_timeout))
    identities = _gather_ranks(store, env, identity, rendezvous_timeout, watch)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=store,
        rank=env.rank,
        world_size=env.world_size,
        timeout=_GROUP_FACTOR * timedelta(seconds=Heartbeat(hang_timeout.total_seconds()).first_timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    yield identities
    # Only after success: after an exception no collective may be entered, and the process ends at once.
    dist.barrier()
    with _exit_after(_TEARDOWN_TIMEOUT):
        dist.destroy_process_group()


@contextlib.contextmanager
def _exit_after(timeout: timedelta) -> Iterator[None]:
    """Exit with success if the block hangs: every rank has passed the last barrier, and all files are written."""
    timer = threading.Timer(timeout.total_seconds(), os._exit, [ExitCode.FINISHED])
    timer.daemon = True
    timer.start()
    yield
    timer.cancel()


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


def _gather_ranks(
    store: Store, env: RankEnv, identity: Identity, timeout: timedelta, watch: Callable[[], None]
) -> list[dict[str, Any]]:
    """Wait for every rank, compare the identities on rank 0, and send the verdict to all ranks."""
    store.set(f"rank/{env.rank}", json.dumps(asdict(identity)))
    identities: list[dict[str, Any]] = []
    if env.rank == 0:
        identities, error = _compare_ranks(store, env, timeout, watch)
        store.set("verdict", json.dumps(error))
        _wait_until(lambda: store.check([f"heard/{rank}" for rank in _arrived(store, env)[1:]]), _VERDICT_GRACE, watch)
    else:
        if not _wait_until(lambda: store.check(["verdict"]), timeout + _VERDICT_GRACE, watch):
            raise MissingRankError(
                f"rank 0 gave no verdict within {timeout} (seen from rank {env.rank} on {identity.host})"
            )
        error = json.loads(store.get("verdict"))
        store.set(f"heard/{env.rank}", "")
    if error is not None:
        raise {"missing": MissingRankError, "disagreement": DisagreementError}[error["kind"]](error["message"])
    return identities


def _compare_ranks(
    store: Store, env: RankEnv, timeout: timedelta, watch: Callable[[], None]
) -> tuple[list[dict[str, Any]], dict[str, str] | None]:
    """Return the identities of all ranks, and the error; None if there is none."""
    everyone = [f"rank/{rank}" for rank in range(env.world_size)]
    if not _wait_until(lambda: store.check(everyone), timeout, watch):
        arrived = set(_arrived(store, env))
        missing = [rank for rank in range(env.world_size) if rank not in arrived]
        return [], {"kind": "missing", "message": missing_sentence(env, missing, timeout)}
    identities = [json.loads(store.get(key)) for key in everyone]
    sentence = disagreement_sentence(identities) or shared_gpu_sentence(identities)
    return identities, {"kind": "disagreement", "message": sentence} if sentence else None


def _arrived(store: Store, env: RankEnv) -> list[int]:
    return [rank for rank in range(env.world_size) if store.check([f"rank/{rank}"])]


def _wait_until(met: Callable[[], bool], timeout: timedelta, watch: Callable[[], None]) -> bool:
    deadline = time.monotonic() + timeout.total_seconds()
    while not met():
        watch()
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def missing_sentence(env: RankEnv, missing: list[int], timeout: timedelta) -> str:
    """Return the error that names the ranks in ``missing`` and their hosts."""
    # If the launcher gives no host names, a job of one node runs on this host.
    unnamed = socket.gethostname() if env.nodes == 1 else "an unknown host"
    named = ", ".join(f"rank {rank} on {env.host_of(rank) or unnamed}" for rank in missing[:_MOST_NAMED])
    more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
    return (
        f"{len(missing)} of {env.world_size} ranks did not start within the rendezvous timeout of "
        f"{timeout.total_seconds():.0f} s: {named}{more}; look at those hosts, or raise launch.rendezvous_timeout"
    )


def disagreement_sentence(identities: list[dict[str, Any]]) -> str | None:
    """Return the error that names the first rank that differs from the majority, or None if all agree."""
    for field, label in _MUST_AGREE.items():
        common, _ = Counter(identity[field] for identity in identities).most_common(1)[0]
        for rank, identity in enumerate(identities):
            if identity[field] != common:
                return (
                    f"rank {rank} on {identity['host']} has {label} {identity[field]}, the other ranks have {common}; "
                    "every host must see the same environment and the same run directory"
                )
    return None


def shared_gpu_sentence(identities: list[dict[str, Any]]) -> str | None:
    """Return the error that names two ranks on one GPU, or None."""
    seen: dict[str, int] = {}
    for rank, identity in enumerate(identities):
        if (gpu := identity["gpu"]) is None:
            continue
        if gpu in seen:
            return (
                f"ranks {seen[gpu]} and {rank} on {identity['host']} share the GPU {gpu}; "
                "one task needs one GPU: ask for as many GPUs per node as tasks per node"
            )
        seen[gpu] = rank
    return None


def collective_trace() -> str | None:
    """Return the trace of the newest collectives of this process as JSON, from torch's flight recorder.

    Returns:
        None without a process group, and if this torch has no recorder for its backend.
    """
    if not dist.is_initialized():
        return None
    name = "_dump_nccl_trace_json" if dist.get_backend() == "nccl" else "_dump_fr_trace_json"
    # Some builds of torch have only one of the two.
    dump: Callable[[], bytes] | None = getattr(torch._C._distributed_c10d, name, None)  # noqa: SLF001
    return None if dump is None else dump().decode()


# Set by torchrun and by srun. The variables of sbatch do not count: the batch script itself has them.
_COUNTS = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


class NoGroupError(UserError):
    """Several processes have been started, and no process group is open."""

    kind: ClassVar[str] = "no_group"


def rank() -> int:
    """Return this process's rank; 0 where no process group is open."""
    return dist.get_rank() if dist.is_initialized() else 0


def broadcast_numbers(numbers: Sequence[int]) -> list[int]:
    """Return rank 0's numbers on every rank; every rank passes equally many."""
    if not dist.is_initialized():
        return list(numbers)
    tensor = torch.tensor(list(numbers), dtype=torch.int64, device=collective_device())
    dist.broadcast(tensor, src=0)
    return [int(number) for number in tensor.tolist()]


def collective_device() -> torch.device:
    """Return the device of tensors for collectives of the default process group."""
    if dist.get_backend() == "nccl":
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
                f"{name} is {count}, so that {count} processes have been started, but no process group is open and "
                "each would take itself for the only one; call torch.distributed.init_process_group first"
            )
