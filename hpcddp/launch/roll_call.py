"""Waiting until every rank of an attempt is there, for programs that meet only later, or never."""

from __future__ import annotations

import time
from datetime import timedelta

from hpcddp.launch.rendezvous import RendezvousError, raise_if_a_rank_failed
from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.files import read_json, write_json
from hpcddp.slurm.rank_env import RankEnv

_POLL_S = 0.05
_NAMED_AT_MOST = 8


def report(env: RankEnv, attempt: AttemptDirectory, *, host: str) -> None:
    """Say that this rank is there.

    Args:
        env: who this rank is.
        attempt: its attempt.
        host: its host.
    """
    write_json(attempt.rank_here(env.rank), {"host": host, "gpu": None})


def wait_for_all(env: RankEnv, attempt: AttemptDirectory, *, timeout: timedelta) -> None:
    """Wait on rank 0 until every rank has reported, and write down where each runs.

    Args:
        env: who this rank is.
        attempt: its attempt.
        timeout: how long to wait.

    Raises:
        RendezvousError: some rank did not report in time; it is named with its host. Or a rank has failed.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    missing = list(range(env.world_size))
    while missing := [rank for rank in missing if not attempt.rank_here(rank).exists()]:
        raise_if_a_rank_failed(attempt)
        if time.monotonic() > deadline:
            raise RendezvousError(f"{_places(env, missing)} did not appear within the rendezvous timeout")
        time.sleep(_POLL_S)
    write_json(attempt.ranks, [read_json(attempt.rank_here(rank)) for rank in range(env.world_size)])


def _places(env: RankEnv, ranks: list[int]) -> str:
    named = ", ".join(f"{rank} on {env.host_of(rank) or 'its host'}" for rank in ranks[:_NAMED_AT_MOST])
    more = f" and {len(ranks) - _NAMED_AT_MOST} more" if len(ranks) > _NAMED_AT_MOST else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {named}{more}"
