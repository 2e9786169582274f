"""Ranks that wait for one that stands still in the middle of a message, or does not come, or that average gradients."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpcddp.stop.reasons import StopReason
from hpcddp.task.attribution import is_peer_loss
from hpcddp.task.member import open_sockets
from hpcddp.task.watchdog import waits_for_others
from hpcddp.train.data.grouping import with_groups
from hpcddp.train.data.identity import refuse_other_data
from hpcddp.train.data.parts import Data
from hpcddp.train.distributed import abandon_process_group, broadcast_numbers
from hpcddp.train.model.average import average, use_hook
from hpcddp.train.model.guard import ReplicaGuard
from hpcddp.train.model.merging import gather_samples
from hpcddp.train.scoring.builtin import TopKAccuracy
from hpcddp.train.scoring.evaluate import ValidationShare, evaluate
from hpcddp.train.stopper import agree_on_stop
from hpcddp.train.waits import WAITS
from tests.distributed.numerics import replica_of

# 160 MB: far more than the buffers of a connection hold.
NUMBERS = 40_000_000


def open_group(directory: Path, rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory / 'store'}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=10),
    )


def wait(directory: Path, source: int, rank: int) -> int:
    """Broadcast from one of two ranks, of which rank 1 stands still in the middle; say how rank 0's wait ends."""
    open_group(directory, rank, 2)
    other = int(_exchange_pids()[1])
    WAITS.begin()
    numbers = torch.full([NUMBERS], float(rank == source))
    work = dist.broadcast(numbers, src=source, async_op=True)
    assert work is not None
    if rank == 1:
        if source == 0:
            _wait_for_first(numbers)
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)
        return 1
    if source == 1:
        _wait_for_first(numbers)
        os.kill(other, signal.SIGSTOP)
    # Without an end of the wait the test must not hang.
    signal.alarm(20)
    threading.Timer(1, _break).start()
    try:
        WAITS.wait(work)
    except RuntimeError as error:
        print(is_peer_loss(error), str(error).splitlines()[0])
    abandon_process_group()
    os.kill(other, signal.SIGKILL)
    return 0


def _exchange_pids() -> list[torch.Tensor]:
    pids = [torch.zeros((), dtype=torch.int64) for _ in range(2)]
    dist.all_gather(pids, torch.tensor(os.getpid()))
    return pids


def _wait_for_first(numbers: torch.Tensor) -> None:
    while numbers[0] == 0:
        pass


def _break() -> None:
    main = sys._current_frames()[threading.main_thread().ident or 0]
    print("waits" if waits_for_others(main) else "is at work", end=" ", flush=True)
    for descriptor in open_sockets().values():
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.getpeername()
            connection.shutdown(socket.SHUT_RDWR)
    WAITS.end()


def wait_in_backward(directory: Path, rank: int) -> int:
    """Wait in a backward of DDP for a rank that makes none; say how the wait ends."""
    open_group(directory, rank, 2)
    parallel = DistributedDataParallel(nn.Linear(3, 1))
    use_hook(parallel, average)
    dist.barrier()
    WAITS.begin()
    if rank == 1:
        time.sleep(3)
        return 0
    signal.alarm(20)
    threading.Timer(0.5, WAITS.end).start()
    try:
        parallel(torch.ones(1, 3)).sum().backward()
    except RuntimeError as error:
        print(is_peer_loss(error), str(error).splitlines()[0])
    return 0


def wait_for_few_numbers(directory: Path, rank: int) -> int:
    """Call each collective for a few numbers beside a rank that calls none; say how the waits end."""
    open_group(directory, rank, 2)
    replica = replica_of(nn.Linear(3, 1))
    cpu = torch.device("cpu")
    data = Data(name="mine", train=range(4), val=range(2), classes=2, fingerprint="ab")
    results = [(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64))]
    waits: dict[str, Callable[[], object]] = {
        "numbers of rank 0": lambda: broadcast_numbers([1]),
        "reasons to stop": lambda: agree_on_stop(StopReason.NONE, cpu),
        "samples": lambda: gather_samples(1, cpu),
        "hashes of replicas": lambda: ReplicaGuard(1).check(replica, 7),
        "widths of metrics": lambda: evaluate(ValidationShare(2, batch_size=1), results, {"top1": TopKAccuracy(1)}),
        "data": lambda: refuse_other_data(data, rank=rank, world_size=2, device=cpu),
        "groups": lambda: with_groups(data, "tests.distributed.waiting_rank:group_of", cpu),
        "barrier": lambda: WAITS.run(dist.barrier),
    }
    dist.barrier()
    if rank == 1:
        time.sleep(0.2 * len(waits) + 2)
        return 0
    signal.alarm(20)
    for name, wait_for_numbers in waits.items():
        WAITS.begin()
        threading.Timer(0.2, WAITS.end).start()
        try:
            wait_for_numbers()
        except RuntimeError as error:
            print(name, is_peer_loss(error), str(error).splitlines()[0], sep=": ")
    return 0


def group_of(index: int) -> int:
    return index // 2


class _Net(nn.Module):
    """Has parameters of real and of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.real = nn.Linear(5, 7)
        self.complex = nn.Parameter(torch.ones(7, dtype=torch.complex64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.real(inputs) * self.complex
        return outputs.abs().square().mean()


def compare_averages(directory: Path, rank: int) -> int:
    """Average the same gradients with the hook and as DDP itself does; say whether all have the same bits."""
    open_group(directory, rank, 3)
    WAITS.begin()
    gradients = []
    for has_hook in (False, True):
        torch.manual_seed(0)
        net = _Net()
        parallel = DistributedDataParallel(net, gradient_as_bucket_view=True)
        if has_hook:
            use_hook(parallel, average)
        torch.manual_seed(rank)
        # The second step is that of the rebuilt buckets.
        for _ in range(2):
            net.zero_grad(set_to_none=True)
            with parallel.no_sync():
                parallel(torch.randn(4, 5)).backward()
            parallel(torch.randn(4, 5)).backward()
        gradients.append([parameter.grad for parameter in net.parameters()])
    print(all(torch.equal(plain, hooked) for plain, hooked in zip(*gradients, strict=True)))
    return 0
