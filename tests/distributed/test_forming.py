"""Real ranks that form a generation, of which one dies meanwhile: those that are left form the next one."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpcddp.run.directory import RunDirectory
from hpcddp.stop.heartbeat import Heartbeat
from hpcddp.supervise.generations import NewGeneration
from hpcddp.supervise.job_nodes import JobNodes
from hpcddp.supervise.members import MemberService
from hpcddp.task.training import _Generation, _TrainingRank
from hpcddp.train.context import Recovery
from hpcddp.train.waits import CollectiveWaits
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


@pytest.mark.parametrize("shares_state", [False, True])
def test_the_first_step_with_other_ranks_may_take_ten_times_the_beginning_of_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, shares_state: bool
) -> None:
    """It may compile again; where the state is shared, the step of a new process compiles for the first time."""
    seconds = 0.0
    heartbeat = Heartbeat(10.0, monotonic=lambda: seconds)
    seconds = 7.0
    heartbeat.at_step(1)
    monkeypatch.setattr("hpcddp.task.training._heartbeat", lambda *_, **__: heartbeat)
    monkeypatch.setattr("hpcddp.train.distributed.process_group", lambda *_, **__: nullcontext())
    monkeypatch.setattr("hpcddp.train.waits.WAITS", CollectiveWaits())
    launch = SimpleNamespace(rendezvous_timeout=timedelta(minutes=1), hang_timeout=timedelta(seconds=10))
    inputs: Any = SimpleNamespace(
        spec=SimpleNamespace(launch=launch),
        attempt=RunDirectory(tmp_path).attempt(0),
        env=SimpleNamespace(world_size=2),
    )
    member: Any = SimpleNamespace(open_group=lambda _: None, raise_if_broken=lambda: None, begin=lambda: None)
    recovery = Recovery(state=None, data=None, source=0, shares_state=shares_state, completes_records=False)
    generation = _Generation(
        number=1, env=inputs.env, address="", port=0, listener=None, connect_timeout_s=1.0, recovery=recovery
    )
    rank = _TrainingRank(inputs, torch.device("cpu"), member)
    heartbeat.expect_long()
    with ExitStack() as stack:
        rank._open_group(generation, stack)
        # The training is built.
        assert heartbeat.timeout_s == (1800.0 if shares_state else 70.0)
        # The loop begins.
        heartbeat.beat()
        assert heartbeat.timeout_s == 70.0
        heartbeat.at_step(2)
        assert heartbeat.timeout_s == 10.0
