"""One rank that forms generations without a training: it opens process groups until the ranks that are left agree."""

from __future__ import annotations

import os
import signal
import socket
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not marked so

from hpcddp.slurm.rank_env import RankEnv
from hpcddp.stop.heartbeat import Heartbeat
from hpcddp.task.channel import connect
from hpcddp.task.member import Formation, Member, Position
from hpcddp.task.rendezvous import RendezvousError, bind_port
from hpcddp.train import distributed
from hpcddp.train.waits import WAITS

KEY = b"the token"


def die() -> None:
    """End this process as the kernel does."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def form(port: int, dies: str, rank: int) -> int:
    """Leave generation 0, and open the group of each next one until all of its ranks have summed up their numbers.

    Args:
        port: the service's port.
        dies: where ranks die in generation 1: words ``NUMBER:PLACE``, with a place of "store" (before it reaches rank
            0's store), "met" (when all have met there), or "late" (it does not die, but comes late).
        rank: this rank's number.
    """
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    places = dict(word.split(":") for word in dies.split())
    place = places.get(str(rank))
    hello = {
        "number": rank,
        "process": str(rank),
        "task": {"SLURMD_NODENAME": f"n{rank}"},
        "identity": {},
        "left": None,
    }
    channel = connect(["127.0.0.1"], port, KEY, hello, deadline=time.monotonic() + 20)
    member = Member(channel, Heartbeat, end=lambda _why: os._exit(3))
    member.allow(1)
    if place == "first":
        time.sleep(0.5)
        die()
    assert member.is_broken()
    while True:
        listener = bind_port(single_host=True)
        formation = member.leave(Position(step=7, evaluated_step=0), listener)
        if formation is None:
            print("end", flush=True)
            return 3
        began = time.monotonic()
        try:
            total = _sum_of_numbers(member, formation, listener, rank, place if formation.generation == 1 else None)
        except (RuntimeError, RendezvousError) as error:
            print(f"{formation.generation}: {time.monotonic() - began:.2f} s: {error}", flush=True)
            distributed.abandon_process_group()
        else:
            print(f"{formation.generation}: {total:.0f} of {formation.world_size}", flush=True)
            time.sleep(0.5)
            os._exit(0)


def _sum_of_numbers(
    member: Member, formation: Formation, listener: socket.socket, rank: int, place: str | None
) -> float:
    WAITS.begin()
    member.open_group(WAITS.end)
    if place == "store":
        die()
    if place == "late":
        time.sleep(1)
    if place == "met":
        wait_for_all = distributed._wait_for_all

        def die_when_all_are_there(store: TCPStore, env: RankEnv) -> None:
            wait_for_all(store, env)
            die()

        distributed._wait_for_all = die_when_all_are_there
    is_rank_0 = formation.rank == 0
    if not is_rank_0:
        listener.close()
    env = RankEnv(
        rank=formation.rank,
        local_rank=formation.rank,
        world_size=formation.world_size,
        local_world_size=formation.world_size,
        node_rank=0,
        nodes=1,
        hosts=("n1",),
        tasks_per_node=(formation.world_size,),
        source="slurm",
    )
    group = distributed.process_group(
        env,
        address=formation.address,
        port=formation.port,
        listener=listener if is_rank_0 else None,
        device=torch.device("cpu"),
        rendezvous_timeout=timedelta(seconds=60),
        hang_timeout=timedelta(seconds=60),
        forming=distributed.Forming(
            connect_timeout=timedelta(seconds=formation.connect_timeout_s), raise_if_broken=member.raise_if_broken
        ),
    )
    group.__enter__()
    member.begin()
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    return float(total)
