"""The ranks of one attempt meet, or an error says who is missing."""

import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from hpcddp.run.directory import AttemptDirectory, RunDirectory
from hpcddp.run.failure import FailureRecord, write_failure
from hpcddp.run.files import read_json, write_json
from hpcddp.run.job_records import PublishedAddress, Start, publish_address, write_start
from hpcddp.run.record import RecordError
from hpcddp.slurm.rank_env import RankEnv
from hpcddp.task import rendezvous
from hpcddp.task.rendezvous import PORTS, RendezvousError, bind_port, meet
from tests.run.damage import DAMAGES, Damage


def rank_env(rank: int, world_size: int = 2) -> RankEnv:
    return RankEnv(
        rank=rank,
        local_rank=rank,
        world_size=world_size,
        local_world_size=world_size,
        node_rank=0,
        nodes=1,
        hosts=("n1",),
        tasks_per_node=(world_size,),
        source="slurm",
    )


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDirectory:
    attempt = RunDirectory(tmp_path).attempt(0)
    attempt.path.mkdir(parents=True)
    write_start(attempt, Start(job_id="1", host="n1", time=0.0, token="abc"))
    return attempt


def test_the_others_find_the_port_that_rank_0_keeps(attempt: AttemptDirectory) -> None:
    with ThreadPoolExecutor(2) as pool:
        late = pool.submit(meet, rank_env(1), attempt, own_host="n1", timeout=timedelta(seconds=20))
        first = meet(rank_env(0), attempt, own_host="n1", timeout=timedelta(seconds=20))
        second = late.result()
    assert first.listener is not None
    with first.listener:
        assert first.listener.getsockname()[1] == first.port == second.port
    assert first.port in PORTS
    assert second.listener is None
    assert (first.token, second.token) == ("abc", "abc")
    assert second.interface == "lo"


def test_a_port_in_use_is_skipped() -> None:
    with bind_port("same token") as first, bind_port("same token") as second:
        assert second.getsockname()[1] == (first.getsockname()[1] - PORTS.start + 1) % len(PORTS) + PORTS.start


def test_no_other_host_can_connect_to_a_job_on_one_host() -> None:
    with bind_port("same token", single_host=True) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_a_port_range_without_a_free_port_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(rendezvous, "PORTS", range(port, port + 1))
        with pytest.raises(RendezvousError, match=f"no port of {port}-{port} is free"):
            bind_port("x")


def test_a_missing_rank_0_of_a_job_on_one_host_is_named_with_this_host(attempt: AttemptDirectory) -> None:
    env = replace(rank_env(1), hosts=(), tasks_per_node=(), source="submitit")
    with pytest.raises(RendezvousError, match="rank 0 on laptop did not appear within the rendezvous timeout"):
        meet(env, attempt, own_host="laptop", timeout=timedelta(seconds=0.1))


def test_a_missing_rank_0_is_named_with_its_host(attempt: AttemptDirectory) -> None:
    with pytest.raises(RendezvousError, match="rank 0 on n1 did not appear within the rendezvous timeout"):
        meet(rank_env(1), attempt, own_host="n2", timeout=timedelta(seconds=0.2))


def test_a_rank_0_that_cannot_be_reached_is_named_with_its_addresses(attempt: AttemptDirectory) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    write_json(attempt.rendezvous, {"host": "n1", "addresses": ["127.0.0.1"], "port": port, "token": "abc"})
    with pytest.raises(RendezvousError, match=f"rank 1 on n2 cannot reach rank 0 on n1 at 127.0.0.1 port {port}"):
        meet(rank_env(1), attempt, own_host="n2", timeout=timedelta(seconds=0.2))


def test_no_rank_waits_for_a_rank_that_has_failed(attempt: AttemptDirectory) -> None:
    record = FailureRecord(
        rank=0, host="n1", time=1.0, kind="X", message="no GPU", traceback="", exit_code=70, secondary=False
    )
    write_failure(attempt, record)
    assert read_json(attempt.rank_error(0)) == record.as_document()
    with pytest.raises(RendezvousError, match="rank 0 on n1 failed before all ranks had met: no GPU"):
        meet(rank_env(1), attempt, own_host="n1", timeout=timedelta(seconds=60))


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_address_of_rank_0_is_one_sentence_that_names_its_file(
    attempt: AttemptDirectory, damage: Damage
) -> None:
    publish_address(attempt, PublishedAddress(host="n1", addresses=("127.0.0.1",), port=20000, token="abc"))
    damage(attempt.rendezvous)
    with pytest.raises(RecordError) as caught:
        meet(rank_env(1), attempt, own_host="n1", timeout=timedelta(seconds=1))
    assert caught.value.message.startswith(f"{attempt.rendezvous} ")
    assert "\n" not in caught.value.message
