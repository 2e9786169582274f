"""What the process group says of ranks that did not come."""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hpcddp.run.collectives import read_collectives, write_trace
from hpcddp.run.directory import RunDirectory
from hpcddp.slurm.rank_env import RankEnv
from hpcddp.train.distributed import collective_trace, missing_sentence


@pytest.mark.parametrize(
    ("nodes", "hosts", "expected"),
    [(1, (), f"rank 1 on {socket.gethostname()}"), (2, ("n1", "n2"), "rank 1 on n2"), (2, (), "an unknown host")],
)
def test_missing_rank_is_named_with_its_host(nodes: int, hosts: tuple[str, ...], expected: str) -> None:
    env = RankEnv(
        rank=0,
        local_rank=0,
        world_size=2,
        local_world_size=2 // nodes,
        node_rank=0,
        nodes=nodes,
        hosts=hosts,
        tasks_per_node=(2 // nodes,) * nodes,
        source="slurm",
    )
    assert expected in missing_sentence(env, [1], timedelta(seconds=8))


@pytest.mark.usefixtures("group")
def test_the_recorder_of_gloo_is_read(tmp_path: Path) -> None:
    dist.all_reduce(torch.ones(3))
    trace = collective_trace()
    assert trace is not None
    attempt = RunDirectory(tmp_path).attempt(0)
    attempt.path.mkdir(parents=True)
    write_trace(attempt, 0, trace)
    last = read_collectives(attempt)[0][-1]
    assert (last.group, last.call) == ("0 (default_pg)", "all_reduce Float[3]")


def test_without_a_group_there_is_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    assert collective_trace() is None
