"""``hpcddp.Checkpointer`` on two ranks: what happens on rank 0 is known to both."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from hpcddp.run.checkpoints import list_checkpoints
from tests.forked_python import ForkedPython
from tests.messages import GoldenMessages

PROGRAM = Path(__file__).with_name("checkpointer_rank.py")


def run_ranks(run: Path, faults: str = "") -> list[list[str]]:
    """Run the program on two ranks and return what each printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        ForkedPython(PROGRAM, str(run), faults, env={**os.environ, **group, "RANK": str(rank), "OMP_NUM_THREADS": "1"})
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate()[0].splitlines() for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    return outputs


def test_every_rank_restores_what_rank_0_saved(tmp_path: Path) -> None:
    first, _ = run_ranks(tmp_path / "run")
    again = run_ranks(tmp_path / "run")
    before = first[0].replace("after step 0", "after step 4")
    assert [rank[0] for rank in again] == [before, before]
    assert [rank[1:] for rank in again] == [["saved True"] * 4] * 2
    assert list_checkpoints(tmp_path / "run" / "checkpoints")[0].name == "step-000008"


@pytest.mark.parametrize(
    ("faults", "waited", "on_rank_0"),
    [
        ("oserror=ENOSPC@save.file", ["saved False"] * 3, "SaveError: saving after step 3 failed ([Errno 28]"),
        ("exception@save.file:2", ["saved True"], "InjectedError: a fault was asked for at save.file"),
    ],
    ids=["disk full", "exception"],
)
def test_error_of_the_writing_rank_ends_the_loop_of_every_rank(
    golden: GoldenMessages, tmp_path: Path, faults: str, waited: list[str], on_rank_0: str
) -> None:
    zero, one = run_ranks(tmp_path / "run", faults)
    assert zero[1:-1] == one[1:-1] == waited
    assert zero[-1].startswith(on_rank_0)
    golden.message(one[-1])
    assert one[-1].startswith("SaveError: rank 0 can no longer save")
    assert "error of rank 0 has the reason" in one[-1]
