"""The process group holds every rank, or every rank says why not; who reaches its store ends it as infrastructure."""

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not marked so

from hpcddp.run.directory import RunDirectory
from hpcddp.run.job_records import Start, write_start
from tests.forked_python import ForkedPython
from tests.messages import GoldenMessages

pytestmark = pytest.mark.distributed

WORKER = Path(__file__).parent / "group_worker.py"


def run_ranks(
    tmp_path: Path,
    ranks: Sequence[int],
    *,
    world_size: int,
    versions: Mapping[int, str] = MappingProxyType({}),
    timeout_s: float = 60,
    nodes: int = 1,
    interfere: Callable[[int], None] | None = None,
) -> list[tuple[int, str]]:
    attempt = RunDirectory(tmp_path).attempt(0)
    attempt.path.mkdir(parents=True)
    write_start(attempt, Start(job_id="1", host="n1", time=0.0, is_local=False, token="abc"))
    processes = [
        ForkedPython(
            WORKER, str(attempt.path), *map(str, (rank, world_size, nodes, versions.get(rank, "1"), timeout_s))
        )
        for rank in ranks
    ]
    if interfere is not None:
        interfere(int(processes[0].stdout.readline()))
    outputs = [process.communicate(timeout=240)[0].strip() for process in processes]
    return [(process.wait(), output.rpartition("\n")[2]) for process, output in zip(processes, outputs, strict=True)]


def test_all_ranks_meet_and_reduce(tmp_path: Path) -> None:
    assert run_ranks(tmp_path, range(3), world_size=3) == [(0, "3.0")] * 3


def test_missing_ranks_are_named_with_their_host_on_every_rank(golden: GoldenMessages, tmp_path: Path) -> None:
    ended = run_ranks(tmp_path, [0, 2], world_size=4, timeout_s=8)
    message = golden.message(ended[0][1])
    assert ended == [(71, message)] * 2
    assert message.startswith("missing_rank 2 of 4 ranks")
    assert "timeout of 8 s" in message
    assert "rank 1 on n1, rank 3 on n1" in message
    assert "raise launch.rendezvous_timeout" in message


def test_the_rank_with_another_version_is_named(golden: GoldenMessages, tmp_path: Path) -> None:
    ended = run_ranks(tmp_path, range(3), world_size=3, versions={1: "2"})
    message = golden.message(ended[0][1])
    assert ended == [(70, message)] * 3
    assert message.startswith("disagreement rank 1 on n1 ")
    assert "has hpcddp 2" in message
    assert "other ranks have 1" in message


def change_every_key(port: int) -> None:
    """Write another text into each key of torch's store as soon as it is there."""
    store = TCPStore("127.0.0.1", port, None, is_master=False, timeout=timedelta(seconds=60), wait_for_workers=False)
    for _ in range(2000):
        try:
            for key in store.list_keys():
                store.set(key, "\x1b[31mtext of a stranger")
        except RuntimeError:
            # The group has failed, and its store is closed.
            return
        time.sleep(0.001)


def test_who_changes_the_keys_of_torchs_store_causes_a_failure_of_the_infrastructure(tmp_path: Path) -> None:
    ended = run_ranks(tmp_path, range(4), world_size=4, nodes=2, timeout_s=30, interfere=change_every_key)
    assert {code for code, _ in ended} <= {0, 71}, ended
    assert not any("\x1b" in output for _, output in ended)
