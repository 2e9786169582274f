"""Comparison of a run that met faults with the same run uninterrupted."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from hpcddp.run.directory import RunDirectory
from tests.cluster.jobs import result_of
from tests.cluster.tracked_run import TrackedRun, records, trace_file

REPORT = "HPCDDP_PROOF"
"""Environment variable: the file to which every comparison is appended, for the table in docs/faults.md."""


@dataclass(frozen=True, kw_only=True)
class Forward:
    """One training forward of one rank: when, how many samples, and a digest of them."""

    time: float
    samples: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """What a run lost and repeated, and whether its result is that of the uninterrupted run.

    Attributes:
        attempts: how often it was started.
        steps_lost: steps that some rank computed more than once, each repetition counted.
        samples_repeated: samples that were computed again with them, over all ranks.
        samples_missing: samples of the uninterrupted run that were never computed.
        same_losses: whether there is exactly one record per step, with the uninterrupted run's loss.
        same_parameters: whether the final parameters are its parameters, bit for bit.
        pause_s: from the last step of the first attempt to the first one of the second; None without a second.
    """

    attempts: int
    steps_lost: int
    samples_repeated: int
    samples_missing: int
    same_losses: bool
    same_parameters: bool
    pause_s: float | None

    @property
    def lost_nothing(self) -> bool:
        """Whether nothing was computed twice or left out, and the result is the same."""
        nothing_lost = (self.steps_lost, self.samples_repeated, self.samples_missing) == (0, 0, 0)
        return nothing_lost and self.has_same_result

    @property
    def has_same_result(self) -> bool:
        """Whether losses and parameters are those of the uninterrupted run."""
        return self.same_losses and self.same_parameters and self.samples_missing == 0


def compare_runs(tracked: TrackedRun, reference: TrackedRun) -> RunComparison:
    """Compare a finished run with the uninterrupted one with as many ranks.

    Args:
        tracked: the run.
        reference: the uninterrupted run.
    """
    world_size = tracked.result["world_size"]
    lost = repeated = missing = 0
    for rank in range(world_size):
        once = Counter(forward.digest for forward in forwards(reference.run, rank))
        samples = {forward.digest: forward.samples for forward in forwards(reference.run, rank)}
        computed = Counter(forward.digest for forward in forwards(tracked.run, rank))
        again = computed - once
        lost = max(lost, again.total())
        repeated += sum(samples.get(digest, 0) * times for digest, times in again.items())
        missing += sum(samples[digest] * times for digest, times in (once - computed).items())
    return RunComparison(
        attempts=tracked.attempts,
        steps_lost=lost,
        samples_repeated=repeated,
        samples_missing=missing,
        same_losses=_losses(tracked.run) == _losses(reference.run),
        same_parameters=_parameters(tracked.run) == _parameters(reference.run),
        pause_s=_pause(tracked.run),
    )


def report(fault: str, tracked: TrackedRun, comparison: RunComparison | None = None) -> None:
    """Append one trial to the report, if one is asked for; a run that did not finish has no comparison."""
    path = os.environ.get(REPORT)
    if path is None:
        return
    fields = tracked.sandbox.job(tracked.job_id)
    document = {
        "fault": fault,
        "state": fields["JobState"],
        "exit": fields["ExitCode"],
        "restarts": int(fields["Restarts"]),
        "account": None if comparison is None else asdict(comparison),
    }
    with Path(path).open("a") as stream:
        stream.write(f"{json.dumps(document)}\n")


def forwards(run: RunDirectory, rank: int) -> list[Forward]:
    """Return a rank's training forwards over all attempts, in order."""
    found = []
    for attempt in range((run.newest_attempt() or 0) + 1):
        path = trace_file(run.attempt(attempt), rank)
        for line in path.read_text().splitlines() if path.exists() else []:
            time, samples, digest = line.split()
            found.append(Forward(time=float(time), samples=int(samples), digest=digest))
    return found


def _losses(run: RunDirectory) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in records(run)]


def _parameters(run: RunDirectory) -> str:
    return str(result_of(run)["parameters_sha256"])


def _pause(run: RunDirectory) -> float | None:
    """Return how long no step was made between the first two attempts that made any."""
    times = []
    for attempt in range((run.newest_attempt() or 0) + 1):
        path = trace_file(run.attempt(attempt), 0)
        lines = path.read_text().splitlines() if path.exists() else []
        times.append([float(line.split()[0]) for line in lines])
    with_steps = [one for one in times if one]
    return with_steps[1][0] - with_steps[0][-1] if len(with_steps) > 1 else None
