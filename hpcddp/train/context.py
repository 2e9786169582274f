"""What a training is told from outside: the job, who this rank is, and the few doors to the world."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from hpcddp.run.directory import RunDirectory
from hpcddp.spec.job import JobSpec, Train
from hpcddp.stop.deadline import Deadline
from hpcddp.stop.heartbeat import Heartbeat
from hpcddp.train.errors import TrainingError


def never_stop() -> int:
    """Return 0: there is no reason to stop."""
    return 0


def unknown_cause() -> str | None:
    """Return None: nobody was asked."""
    return None


def _allowed_cpus() -> int:
    return len(os.sched_getaffinity(0))


def _write_line(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainContext:
    """The facts of one rank's training.

    Args:
        spec: the resolved job.
        rank: 0..world_size-1.
        local_rank: the rank on this node.
        world_size: ranks in the job; the default process group is open and has as many.
        device: the device of this rank.
        run: the run's directory.
        attempt: the number of this attempt; 0 is the first.
        threads: torch's threads in this process.
        cpus: CPUs that the kernel lets this process use; loader workers are counted from them.
        should_stop: asked once per optimizer step on every rank; 0, or the code (a ``StopReason``) of the reason why
            this rank wants to stop. All ranks stop after the same step when any of them wants to.
        cause: asked on rank 0 at a stop; a ``Cause``'s word, or None if it is not known.
        deadline: the end of the job.
        heartbeat: takes this rank's signs of life.
        now: seconds since the epoch.
        monotonic: seconds on a clock that never goes back.
        say: prints one line for the person who reads rank 0's log.
    """

    spec: JobSpec
    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    run: RunDirectory
    attempt: int
    threads: int
    cpus: int = field(default_factory=_allowed_cpus)
    should_stop: Callable[[], int] = never_stop
    cause: Callable[[], str | None] = unknown_cause
    deadline: Deadline = field(default_factory=Deadline)
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    now: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    say: Callable[[str], None] = _write_line

    @property
    def train(self) -> Train:
        """The job's training.

        Raises:
            TrainingError: the job starts something else.
        """
        if self.spec.train is None:
            raise TrainingError("the job has no train section, so that there is nothing to train; write one")
        return self.spec.train

    @property
    def is_main(self) -> bool:
        """Whether this rank writes the run's files."""
        return self.rank == 0

    def tell(self, text: str) -> None:
        """Print one line, on rank 0 only."""
        if self.is_main:
            self.say(text)
