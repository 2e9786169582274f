"""The ranks of one attempt meet, or an error says who is missing."""

import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from threading import Event, Timer

import pytest

from hpcddp.errors import HpcddpError
from hpcddp.run.directory import AttemptDirectory, RunDirectory
from hpcddp.run.failure import beginning, write_failure
from hpcddp.run.files import read_json
from hpcddp.run.job_records import (
    Binding,
    FailureRecord,
    PublishedAddress,
    Start,
    publish_address,
    read_address,
    write_start,
)
from hpcddp.run.record import RecordError
from hpcddp.slurm.rank_env import RankEnv
from hpcddp.task import rendezvous
from hpcddp.task.exchange import ExchangeServer
from hpcddp.task.rendezvous import (
    PORTS,
    DisagreementError,
    Identity,
    MissingRankError,
    PeerFailedError,
    Rendezvous,
    RendezvousError,
    bind_port,
    meet,
    missing_sentence,
    shared_gpu_sentence,
)
from tests.facts import assert_facts
from tests.messages import GoldenMessages
from tests.run.damage import DAMAGES, Damage
from tests.task.strangers import STRANGERS
from tests.waiting import wait_until


def rank_env(rank: int, world_size: int = 2, *, nodes: int = 1) -> RankEnv:
    local = world_size // nodes
    return RankEnv(
        rank=rank,
        local_rank=rank % local,
        world_size=world_size,
        local_world_size=local,
        node_rank=rank // local,
        nodes=nodes,
        hosts=tuple(f"n{node + 1}" for node in range(nodes)),
        tasks_per_node=(local,) * nodes,
        source="slurm",
    )


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDirectory:
    attempt = RunDirectory(tmp_path).attempt(0)
    attempt.path.mkdir(parents=True)
    write_start(attempt, Start(job_id="1", host="n1", time=0.0, is_local=False, token="abc"))
    return attempt


def all_meet(
    attempt: AttemptDirectory, envs: Sequence[RankEnv], identities: Sequence[Identity], timeout_s: float = 60
) -> list[Rendezvous | HpcddpError]:
    """Return what each rank gets, or its error."""

    def one(env: RankEnv, identity: Identity) -> Rendezvous | HpcddpError:
        try:
            return meet(env, attempt, identity, timeout=timedelta(seconds=timeout_s))
        except HpcddpError as error:
            return error

    with ThreadPoolExecutor(len(envs)) as pool:
        return list(pool.map(one, envs, identities))


@pytest.mark.parametrize("nodes", [1, 2])
def test_all_ranks_hear_of_a_port_that_rank_0_keeps(attempt: AttemptDirectory, nodes: int) -> None:
    envs = [rank_env(rank, 4, nodes=nodes) for rank in range(4)]
    bindings = [None, None, Binding(cpus="0-7", cpus_needed=8), Binding(cpus="8-15", cpus_needed=8, gpu_cpus="8-15")]
    identities = tuple(
        Identity(host=f"n{rank}", gpu=f"GPU-{rank}", binding=binding, must_agree={"torch": "2"})
        for rank, binding in enumerate(bindings)
    )
    first, *others = all_meet(attempt, envs, identities)
    assert isinstance(first, Rendezvous)
    assert first.listener is not None
    with first.listener:
        assert first.listener.getsockname()[1] == first.port
    assert first.port in PORTS
    assert first.identities == identities
    for other in others:
        assert isinstance(other, Rendezvous)
        assert (other.port, other.listener, other.identities) == (first.port, None, ())
        assert (other.interface == "lo") is (nodes == 1)


def test_the_port_that_the_ranks_hear_of_and_the_key_are_not_in_the_published_address(
    attempt: AttemptDirectory,
) -> None:
    first, _ = all_meet(attempt, [rank_env(0), rank_env(1)], [Identity(host="n1")] * 2)
    assert isinstance(first, Rendezvous)
    assert first.listener is not None
    first.listener.close()
    assert read_json(attempt.rendezvous).keys() == {"format", "host", "addresses", "port"}
    assert read_json(attempt.rendezvous)["port"] != first.port


def test_every_rank_hears_who_is_missing(attempt: AttemptDirectory, golden: GoldenMessages) -> None:
    envs = [rank_env(rank, 4) for rank in (0, 2)]
    errors = all_meet(attempt, envs, [Identity(host="n1")] * 2, timeout_s=1)
    for error in errors:
        assert isinstance(error, MissingRankError)
        message = golden.message(error.message)
        assert_facts(message, "2 of 4 ranks", "the rendezvous timeout of 1 s", "rank 1 on n1", "rank 3 on n1")
        assert_facts(message, "look at those hosts", "raise launch.rendezvous_timeout")


def test_every_rank_hears_which_rank_differs(attempt: AttemptDirectory, golden: GoldenMessages) -> None:
    identities = [Identity(host="n1", must_agree={"Python": version}) for version in ("3.11", "3.12", "3.11")]
    for error in all_meet(attempt, [rank_env(rank, 3) for rank in range(3)], identities):
        assert isinstance(error, DisagreementError)
        assert error.exit_code == 70
        message = golden.message(error.message)
        assert_facts(message, "rank 1 on n1 has Python 3.12", "the other ranks have 3.11", "the same environment")


def test_every_rank_hears_which_rank_has_failed(attempt: AttemptDirectory, golden: GoldenMessages) -> None:
    record = FailureRecord(
        rank=2, host="n1", time=1.0, kind="X", message="no GPU", traceback="", exit_code=70, secondary=False
    )
    Timer(0.5, write_failure, (attempt, record)).start()
    for error in all_meet(attempt, [rank_env(rank, 3) for rank in (0, 1)], [Identity(host="n1")] * 2):
        assert isinstance(error, PeerFailedError)
        assert_facts(golden.message(error.message), "rank 2 on n1 failed", "no GPU")


def test_every_rank_hears_of_a_rank_that_was_killed(attempt: AttemptDirectory, golden: GoldenMessages) -> None:
    """It has left no record, and srun kills those that wait for it only after KillWait."""
    log = attempt.run.batch_log
    log.write_text(f"srun: error: n1: task 0: Killed\n{beginning(attempt)}")
    Timer(0.5, lambda: log.write_text(f"{log.read_text()}srun: error: n1: task 2: Killed\n")).start()
    for error in all_meet(attempt, [rank_env(rank, 3) for rank in (0, 1)], [Identity(host="n1")] * 2):
        assert isinstance(error, PeerFailedError)
        assert_facts(golden.message(error.message), "rank 2 ended", "Killed")


def test_a_rank_that_loses_rank_0_says_so(attempt: AttemptDirectory, golden: GoldenMessages) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        port = listener.getsockname()[1]
        publish_address(attempt, PublishedAddress(host="n1", addresses=("127.0.0.1",), port=port))
        lost = pool.submit(all_meet, attempt, [rank_env(1)], [Identity(host="n1")])
        with ExchangeServer(listener, b"abc", expected=2, rank_of=lambda _: 1) as server:
            server.gather(deadline=time.monotonic() + 2, watch=lambda: None)
        (error,) = lost.result()
    assert isinstance(error, PeerFailedError)
    assert_facts(golden.message(error.message), "rank 1 on n1 lost rank 0 on n1", "the connection is closed")


def test_ranks_do_not_meet_by_an_empty_key(attempt: AttemptDirectory) -> None:
    write_start(attempt, Start(job_id="1", host="n1", time=0.0, is_local=False))
    with pytest.raises(RendezvousError, match="has no token"):
        meet(rank_env(0), attempt, Identity(host="n1"), timeout=timedelta(seconds=1))


def test_a_rank_of_another_attempt_is_not_counted(attempt: AttemptDirectory) -> None:
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(all_meet, attempt, [rank_env(0)], [Identity(host="n1")], 3)
        wait_until(attempt.rendezvous.exists, "the address of rank 0")
        published = read_address(attempt)
        assert published is not None
        write_start(attempt, Start(job_id="1", host="n1", time=0.0, is_local=False, token="of another attempt"))
        with pytest.raises(RendezvousError, match="cannot reach rank 0 on n1"):
            meet(rank_env(1), attempt, Identity(host="n2"), timeout=timedelta(seconds=0.5))
        (error,) = first.result()
    assert isinstance(error, MissingRankError)


@pytest.mark.parametrize("stranger", STRANGERS.values(), ids=STRANGERS.keys())
def test_strangers_at_the_port_hold_up_neither_the_ranks_nor_the_timeout(
    attempt: AttemptDirectory, stranger: Callable[[int, Event], None]
) -> None:
    ended = Event()
    envs = [rank_env(rank, 4, nodes=2) for rank in range(4)]
    with ThreadPoolExecutor(3) as pool:
        some = pool.submit(all_meet, attempt, envs[:3], [Identity(host="n1")] * 3)
        wait_until(attempt.rendezvous.exists, "the address of rank 0")
        published = read_address(attempt)
        assert published is not None
        flood = pool.submit(stranger, published.port, ended)
        last = pool.submit(all_meet, attempt, envs[3:], [Identity(host="n2")])
        found = some.result() + last.result()
        attempt.rendezvous.unlink()
        missing = pool.submit(all_meet, attempt, envs[:1], [Identity(host="n1")], 2)
        wait_until(attempt.rendezvous.exists, "the address of rank 0")
        (error,) = missing.result()
        ended.set()
        flood.result()
    assert [type(meeting) for meeting in found] == [Rendezvous] * 4
    assert isinstance(found[0], Rendezvous)
    assert found[0].listener is not None
    found[0].listener.close()
    assert isinstance(error, MissingRankError)


def test_shared_gpus_are_named(golden: GoldenMessages) -> None:
    identities = [Identity(host="n1", gpu=f"GPU-{number}") for number in (1, 2, 1)]
    sentence = shared_gpu_sentence(identities)
    assert_facts(golden.message(sentence), "ranks 0 and 2 on n1", "GPU-1")
    assert shared_gpu_sentence([Identity(host="n1")] * 2) is None


@pytest.mark.parametrize(
    ("nodes", "hosts", "expected"),
    [(1, (), f"rank 1 on {socket.gethostname()}"), (2, ("n1", "n2"), "rank 1 on n2"), (2, (), "an unknown host")],
)
def test_a_missing_rank_is_named_with_its_host(nodes: int, hosts: tuple[str, ...], expected: str) -> None:
    env = replace(rank_env(0, nodes=nodes), hosts=hosts, tasks_per_node=(2 // nodes,) * len(hosts))
    assert expected in missing_sentence(env, [1], timedelta(seconds=8))


def test_a_port_in_use_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.randbelow", lambda _: 7)
    with bind_port() as first, bind_port() as second:
        assert second.getsockname()[1] == (first.getsockname()[1] - PORTS.start + 1) % len(PORTS) + PORTS.start


def test_no_other_host_can_connect_to_a_job_on_one_host() -> None:
    with bind_port(single_host=True) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_a_port_range_without_a_free_port_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(rendezvous, "PORTS", range(port, port + 1))
        with pytest.raises(RendezvousError, match=f"no port of {port}-{port} is free"):
            bind_port()


def test_a_missing_rank_0_of_a_job_on_one_host_is_named_with_this_host(
    attempt: AttemptDirectory, golden: GoldenMessages
) -> None:
    env = replace(rank_env(1), hosts=(), tasks_per_node=(), source="submitit")
    with pytest.raises(RendezvousError) as caught:
        meet(env, attempt, Identity(host="laptop"), timeout=timedelta(seconds=0.1))
    assert_facts(golden.message(caught.value), "rank 0 on laptop did not appear", "the rendezvous timeout")


def test_a_missing_rank_0_is_named_with_its_host(attempt: AttemptDirectory, golden: GoldenMessages) -> None:
    with pytest.raises(RendezvousError) as caught:
        meet(rank_env(1), attempt, Identity(host="n2"), timeout=timedelta(seconds=0.2))
    assert_facts(golden.message(caught.value), "rank 0 on n1 did not appear", "the rendezvous timeout", "n2")


@pytest.mark.parametrize(("world_size", "most"), [(2, 22), (10_240, 2)])
def test_many_waiting_ranks_look_rarely_for_rank_0(
    attempt: AttemptDirectory, monkeypatch: pytest.MonkeyPatch, world_size: int, most: int
) -> None:
    looks: list[float] = []
    monkeypatch.setattr(rendezvous, "read_address", lambda _: looks.append(time.monotonic()))
    with pytest.raises(RendezvousError, match="did not appear"):
        meet(rank_env(1, world_size), attempt, Identity(host="n1"), timeout=timedelta(seconds=1))
    assert 1 <= len(looks) <= most


def test_a_rank_0_that_cannot_be_reached_is_named_with_its_addresses(
    attempt: AttemptDirectory, golden: GoldenMessages
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    publish_address(attempt, PublishedAddress(host="n1", addresses=("127.0.0.1",), port=port))
    with pytest.raises(RendezvousError) as caught:
        meet(rank_env(1), attempt, Identity(host="n2"), timeout=timedelta(seconds=0.2))
    message = golden.message(caught.value, {f"port {port}": "port PORT"})
    assert_facts(message, "rank 1 on n2 cannot reach rank 0 on n1", f"127.0.0.1 port {port}")
    assert_facts(message, "let the hosts", f"ports {PORTS.start}-{PORTS.stop - 1}")


def test_no_rank_waits_for_a_rank_that_has_failed(attempt: AttemptDirectory, golden: GoldenMessages) -> None:
    record = FailureRecord(
        rank=0, host="n1", time=1.0, kind="X", message="no GPU", traceback="", exit_code=70, secondary=False
    )
    write_failure(attempt, record)
    assert read_json(attempt.rank_error(0)) == record.as_document()
    with pytest.raises(RendezvousError) as caught:
        meet(rank_env(1), attempt, Identity(host="n1"), timeout=timedelta(seconds=60))
    assert_facts(golden.message(caught.value), "rank 0 on n1 failed", "no GPU")


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_address_of_rank_0_is_one_sentence_that_names_its_file(
    attempt: AttemptDirectory, damage: Damage
) -> None:
    publish_address(attempt, PublishedAddress(host="n1", addresses=("127.0.0.1",), port=20000))
    damage(attempt.rendezvous)
    with pytest.raises(RecordError) as caught:
        meet(rank_env(1), attempt, Identity(host="n1"), timeout=timedelta(seconds=1))
    assert caught.value.message.startswith(f"{attempt.rendezvous} ")
    assert "\n" not in caught.value.message
