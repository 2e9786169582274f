"""What the process group says of ranks that did not come."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest

from hpcddp.slurm.rank_env import RankEnv
from hpcddp.train.distributed import missing_sentence


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
