"""Facts that a training gets from its task: the job, this rank, the run, clocks and callbacks."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.sections import Train
from hpcddp.run.directory import RunDirectory
from hpcddp.run.metrics_log import METRICS_OPEN_S, MetricsFile
from hpcddp.run.ownership import raise_if_fenced
from hpcddp.slurm.rank_env import RankEnv
from hpcddp.stop.deadline import Deadline, KnownEnd
from hpcddp.stop.heartbeat import Heartbeat
from hpcddp.stop.reasons import StopReason
from hpcddp.train.errors import TrainingError
from hpcddp.train.tracking.opening import Tracking, start_trackers


def never_stop() -> StopReason:
    """Return that there is no reason to stop."""
    return StopReason.NONE


def unknown_cause() -> str | None:
    """Return None: the cause is not known."""
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
        rank_env: this rank; the default process group is open and has ``rank_env.world_size`` ranks.
        device: the device of this rank.
        attempt: the number of this attempt; 0 is the first.
        threads: torch's threads in this process.
        cpus: CPUs that the kernel lets this process use; loader workers are counted from them.
        stop_reason: called on every rank when it votes, near the end of a step; returns why this rank wants to stop.
            All ranks stop after the same step if any of them wants to.
        cause: called on rank 0 at a stop; a ``Cause``'s word, or None if it is not known.
        deadline: the end of the job as the attempt began.
        ask_end: asks Slurm for the end of the job, in a thread of rank 0; None = it does not move.
        heartbeat: records when this rank made progress.
        now: seconds since the epoch.
        monotonic: seconds on a clock that never goes back.
        write_line: prints one line to rank 0's log.
    """

    spec: JobSpec
    rank_env: RankEnv
    device: torch.device
    run: RunDirectory
    attempt: int
    threads: int
    cpus: int = field(default_factory=_allowed_cpus)
    stop_reason: Callable[[], StopReason] = never_stop
    cause: Callable[[], str | None] = unknown_cause
    deadline: Deadline = field(default_factory=Deadline)
    ask_end: Callable[[], KnownEnd | None] | None = None
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    now: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    write_line: Callable[[str], None] = _write_line

    @property
    def rank(self) -> int:
        """0..world_size-1."""
        return self.rank_env.rank

    @property
    def world_size(self) -> int:
        """Ranks in the job."""
        return self.rank_env.world_size

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

    def print_on_rank_0(self, text: str) -> None:
        """Print one line, on rank 0 only."""
        if self.is_main:
            self.write_line(text)

    def tracking(self, *, first_step: int | None) -> Tracking:
        """Start the trackers of the attempt, on rank 0, for a block that they learn the ending of.

        Args:
            first_step: as for ``start_trackers``.
        """
        attempt = self.run.attempt(self.attempt)
        if not self.is_main:
            return Tracking(None, attempt, self.print_on_rank_0)
        return start_trackers(self.spec, attempt, first_step=first_step, print_line=self.print_on_rank_0)

    def metrics_file(self, *, open_s: float = METRICS_OPEN_S) -> MetricsFile:
        """Return the metrics file of the run, which an attempt that no longer owns the run must not write."""
        return MetricsFile(
            self.run.metrics,
            monotonic=self.monotonic,
            before_open=lambda: raise_if_fenced(self.run, self.attempt),
            warn=self.print_on_rank_0,
            open_s=open_s,
        )
