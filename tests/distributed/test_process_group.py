"""The process group holds every rank, or every rank says who is missing or different."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpcddp.run.directory import RunDirectory
from hpcddp.run.job_records import Start, write_start
from hpcddp.train.distributed import shared_gpu_sentence

pytestmark = pytest.mark.distributed

WORKER = Path(__file__).parent / "group_worker.py"


def run_ranks(
    tmp_path: Path,
    ranks: Sequence[int],
    *,
    world_size: int,
    versions: dict[int, str] | None = None,
    timeout_s: float = 60,
) -> list[tuple[int, str]]:
    attempt = RunDirectory(tmp_path).attempt(0)
    attempt.path.mkdir(parents=True)
    write_start(attempt, Start(job_id="1", host="n1", time=0.0, token="abc"))
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                WORKER,
                attempt.path,
                str(rank),
                str(world_size),
                (versions or {}).get(rank, "1"),
                str(timeout_s),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in ranks
    ]
    return [
        (process.wait(timeout=120), output) for process in processes for output in [process.communicate()[0].strip()]
    ]


def test_all_ranks_meet_and_reduce(tmp_path: Path) -> None:
    assert run_ranks(tmp_path, range(3), world_size=3) == [(0, "3.0")] * 3


def test_missing_ranks_are_named_with_their_host_on_every_rank(tmp_path: Path) -> None:
    ended = run_ranks(tmp_path, [0, 2], world_size=4, timeout_s=8)
    sentence = (
        "missing_rank 2 of 4 ranks did not start within the rendezvous timeout of 8 s: rank 1 on n1, rank 3 on n1; "
        "look at those hosts, or raise launch.rendezvous_timeout"
    )
    assert ended == [(71, sentence)] * 2


def test_the_rank_with_another_version_is_named(tmp_path: Path) -> None:
    ended = run_ranks(tmp_path, range(3), world_size=3, versions={1: "2"})
    sentence = (
        "disagreement rank 1 on n1 has hpcddp 2, the other ranks have 1; "
        "every host must see the same environment and the same run directory"
    )
    assert ended == [(70, sentence)] * 3


def test_two_ranks_on_one_gpu_are_named() -> None:
    identities = [{"gpu": "GPU-1", "host": "n1"}, {"gpu": "GPU-2", "host": "n1"}, {"gpu": "GPU-1", "host": "n1"}]
    sentence = shared_gpu_sentence(identities)
    assert sentence is not None
    assert sentence.startswith("ranks 0 and 2 on n1 share the GPU GPU-1;")
    assert shared_gpu_sentence([{"gpu": None, "host": "n1"}] * 2) is None
