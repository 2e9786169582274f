"""Trainings in this process: a gloo group of one rank, and jobs that take a second."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpcddp.jobfile.job import JobSpec
from hpcddp.run.directory import RunDirectory
from hpcddp.slurm.rank_env import RankEnv
from hpcddp.stop.deadline import Deadline
from hpcddp.stop.reasons import StopReason
from hpcddp.train.context import TrainContext, never_stop, unknown_cause
from hpcddp.train.loop.job import run_training
from tests.distributed.training import job_document

NO_DEADLINE = Deadline()
ONE_RANK = RankEnv(rank=0, local_rank=0, world_size=1, local_world_size=1, node_rank=0, nodes=1, source="torchrun")


@pytest.fixture(scope="session")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Open a process group of one rank."""
    # Each training ends with a collection, which then leaves out what was there before.
    gc.collect()
    gc.freeze()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    store = tmp_path_factory.mktemp("group") / "store"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


class CrashError(Exception):
    """Stands for a process that dies."""


@dataclass
class Training:
    """One run in a temporary directory, and what it said."""

    run: RunDirectory
    said: list[str] = field(default_factory=list)

    def context(
        self,
        *,
        attempt: int = 0,
        stop_reason: Callable[[], int] = never_stop,
        monotonic: Callable[[], float] = time.monotonic,
        cause: Callable[[], str | None] = unknown_cause,
        deadline: Deadline = NO_DEADLINE,
        **changes: Any,
    ) -> TrainContext:
        """Return what an attempt is told; ``changes`` as for ``job_document``."""
        return TrainContext(
            spec=JobSpec.model_validate(job_document(**changes)),
            rank_env=ONE_RANK,
            device=torch.device("cpu"),
            run=self.run,
            attempt=attempt,
            threads=1,
            cpus=2,
            stop_reason=lambda: StopReason(stop_reason()),
            monotonic=monotonic,
            cause=cause,
            deadline=deadline,
            write_line=self.said.append,
        )

    def train(self, *, attempt: int = 0, **told: Any) -> None:
        """Run an attempt; ``told`` as for ``context``."""
        self.run.attempt(attempt).path.mkdir(parents=True, exist_ok=True)
        run_training(self.context(attempt=attempt, **told))

    def crash(self, *, steps: int, attempt: int = 0, **changes: Any) -> None:
        """Run an attempt that dies when it is about to make step ``steps + 1``."""
        calls = iter(range(steps))

        def die() -> int:
            if next(calls, None) is None:
                raise CrashError
            return 0

        with pytest.raises(CrashError):
            self.train(attempt=attempt, stop_reason=die, **changes)


@pytest.fixture
def new_training(group: None, tmp_path: Path) -> Callable[[str], Training]:  # noqa: ARG001
    """Return a function that makes a run by name."""

    def make(name: str = "run") -> Training:
        path = tmp_path / name
        path.mkdir()
        return Training(RunDirectory(path))

    return make


@pytest.fixture
def training(new_training: Callable[[str], Training]) -> Training:
    """Return a new run."""
    return new_training("run")


@pytest.fixture
def nan_in_new_memory() -> Iterator[None]:
    """Let torch fill memory that nothing has written with NaN."""
    torch.use_deterministic_algorithms(mode=True)
    yield
    torch.use_deterministic_algorithms(mode=False)
