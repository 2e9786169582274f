"""Real ranks that form a generation, of which one dies meanwhile: those that are left form the next one."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from hpcddp.supervise.generations import NewGeneration
from hpcddp.supervise.job_nodes import JobNodes
from hpcddp.supervise.members import MemberService
from tests.distributed.forming_rank import KEY, form
from tests.ranks import ForkedProcess

pytestmark = pytest.mark.distributed

RANKS = 4


class NoNewcomers:
    """Starts no processes, and knows how ranks have ended."""

    def __init__(self, ranks: Mapping[int, ForkedProcess]) -> None:
        self._ranks = ranks

    def start(self, number: int, task: Mapping[str, str]) -> None:
        """Start none."""

    def refuse(self, number: int, why: str) -> None:
        """Refuse none, because none comes."""

    def exit_of(self, number: int) -> str | None:
        return "Killed" if self._ranks[number].poll() == -9 else None


def run(directory: Path, dies: str) -> tuple[list[NewGeneration], Mapping[int, str]]:
    """Run ranks that form generations; return those that formed, and what the ranks that are left printed."""
    recoveries: list[NewGeneration] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
        processes = {
            rank: ForkedProcess(
                form,
                (port, dies, rank),
                environment=os.environ,
                directory=directory,
                output=directory / str(rank),
            )
            for rank in range(RANKS)
        }
        service = MemberService(
            listener,
            KEY,
            world_size=RANKS,
            most_failures=3,
            nodes=JobNodes(["n1"], min_nodes=1, slurm_answers=lambda: True),
            newcomers=NoNewcomers(processes),
            on_new_generation=recoveries.append,
            on_last_generation=lambda _: None,
        )
        service.start()
        deadline = time.monotonic() + 60
        while any(process.poll() is None for process in processes.values()) and time.monotonic() < deadline:
            service.handle(most_s=0.01)
        # accept() in the thread of the service returns.
        listener.shutdown(socket.SHUT_RDWR)
    return recoveries, {
        rank: (directory / str(rank)).read_text() for rank, process in processes.items() if process.poll() == 0
    }


@pytest.mark.parametrize(
    ("dies", "failures", "left"),
    [
        ("3:first 1:store", 2, [0, 2]),
        ("3:first 0:store", 2, [1, 2]),
        ("3:first 1:met", 2, [0, 2]),
        ("3:first 0:met", 2, [1, 2]),
        ("3:first 2:late", 1, [0, 1, 2]),
    ],
)
def test_ranks_that_are_left_form_another_generation(tmp_path: Path, dies: str, failures: int, left: list[int]) -> None:
    recoveries, outputs = run(tmp_path, dies)
    assert list(outputs) == left
    (recovery,) = recoveries
    assert len(recovery.failures) == failures, outputs
    for output in outputs.values():
        assert output.splitlines()[-1] == f"{failures}: {sum(left)} of {len(left)}", outputs
