"""One class knows every path of a run: ``<run_root>/<name>/<run_id>/``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Self

_ATTEMPT: Final = re.compile("0|[1-9][0-9]{0,8}", re.ASCII)
_RANK_LOG: Final = re.compile(r"rank-(0|[1-9][0-9]{0,8})\.log", re.ASCII)

ReservedRecord = Literal["decision", "error", "meeting", "result"]
"""The records that are written into reserve files on a full disk; the two by which ranks meet are ``meeting``."""


def times_of(log: Path) -> Path:
    """Return the file with the times of a rank's log."""
    return log.with_suffix(".times")


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The layout of a run's directory.

    Args:
        path: the directory itself; it need not exist.
    """

    path: Path

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self.path.name

    @property
    def name(self) -> str:
        """The name of the run's job."""
        return self.path.parent.name

    @property
    def run_root(self) -> Path:
        """The directory of all runs, ``run_root`` in the job file."""
        return self.path.parent.parent

    @property
    def job_file(self) -> Path:
        """The resolved job, as every task reads it."""
        return self.path / "job.yaml"

    @property
    def plan(self) -> Path:
        """The batch plan."""
        return self.path / "plan.json"

    @property
    def script(self) -> Path:
        """The script that was submitted."""
        return self.path / "job.sbatch"

    @property
    def exported_values(self) -> Path:
        """The values of ``environment.env`` that the script exports, which the resolved job leaves out."""
        return self.path / "environment.json"

    @property
    def submission(self) -> Path:
        """The submission: the cluster, the job id, the directory of submission, the interpreter."""
        return self.path / "submission.json"

    @property
    def source(self) -> Path:
        """The commit, the uncommitted changes and the package versions at each submission."""
        return self.path / "source.json"

    @property
    def code(self) -> Path:
        """The code files of the project at the submission, with their hashes; an element has those of its sweep."""
        return self.path / "code.json"

    @property
    def code_copies(self) -> Path:
        """The copies of the project's code that ``environment.code: snapshot`` makes, a directory for each."""
        return self.path / "code"

    @property
    def batch_log(self) -> Path:
        """What the batch script itself printed, over all attempts."""
        return self.path / "batch.log"

    @property
    def submitit(self) -> Path:
        """The folder that submitit keeps its pickles in."""
        return self.path / "submitit"

    @property
    def events(self) -> Path:
        """The run's own event log."""
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        """One line per optimizer step and per evaluation."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """The folder that TensorBoard shows."""
        return self.path / "tensorboard"

    @property
    def wandb(self) -> Path:
        """The folder that W&B writes into."""
        return self.path / "wandb"

    @property
    def trackers(self) -> Path:
        """The folder with the position of each tracker."""
        return self.path / "trackers"

    def tracker(self, name: str) -> Path:
        """Return the file with a tracker's name for this run and the last step sent to it."""
        return self.trackers / f"{name}.json"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def result(self) -> Path:
        """The result of the run; written when it ends and is not requeued."""
        return self.path / "result.json"

    def reserves(self, record: ReservedRecord) -> tuple[Path, ...]:
        """Return the reserve files of a kind of record: two, because a result may follow a provisional one.

        Of a meeting there are two records: the address of rank 0, and where all ranks run.
        """
        return tuple(self.path / "reserve" / f"{record}-{number}" for number in range(2))

    def refusal(self, job_id: str | None) -> Path:
        """Return the record of why a job may not use the directory."""
        return self.path / f"refused-{job_id}.json"

    @property
    def progress(self) -> Path:
        """The file that a program of the user's own touches when it has made progress."""
        return self.path / "progress"

    @property
    def sweep_manifest(self) -> Path:
        """The elements and the job arrays of a sweep; only the directory of a sweep has it, as the next two."""
        return self.path / "sweep.json"

    @property
    def sweep_logs(self) -> Path:
        """Where the batch scripts of the elements of a sweep write, a file for each."""
        return self.path / "logs"

    @property
    def sweep_turns(self) -> Path:
        """The locks of the elements of a sweep on this machine."""
        return self.path / "turns"

    @property
    def attempts(self) -> Path:
        """The folder of attempts."""
        return self.path / "attempts"

    def attempt(self, number: int) -> AttemptDirectory:
        """Return the directory of attempt ``number`` (0 is the first)."""
        return AttemptDirectory(self.attempts / str(number))

    def newest_attempt(self) -> int | None:
        """Return the highest attempt number on disk, or None before the first start."""
        return max(self.attempt_numbers(), default=None)

    def attempt_numbers(self) -> Iterator[int]:
        """Yield the numbers of the attempts on disk, in no order."""
        if self.attempts.is_dir():
            yield from (int(entry.name) for entry in self.attempts.iterdir() if _ATTEMPT.fullmatch(entry.name))


@dataclass(frozen=True, slots=True)
class AttemptDirectory:
    """The directory of one attempt: ``attempts/<n>/``."""

    path: Path

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Return the attempt directory that the batch script exported as ``HPCDDP_ATTEMPT_DIR``."""
        return cls(Path(text))

    @property
    def number(self) -> int:
        """The attempt's number."""
        return int(self.path.name)

    @property
    def run(self) -> RunDirectory:
        """The run that this is an attempt of."""
        return RunDirectory(self.path.parent.parent)

    @property
    def start(self) -> Path:
        """Who started this attempt: job id, restart count, submit time, token."""
        return self.path / "start.json"

    @property
    def rendezvous(self) -> Path:
        """Where rank 0 of this attempt listens."""
        return self.path / "rendezvous.json"

    @property
    def decision(self) -> Path:
        """Where this attempt's ranks agreed to stop, and why."""
        return self.path / "decision.json"

    @property
    def end_time(self) -> Path:
        """The end of the job as rank 0 of a command has asked Slurm for it."""
        return self.path / "end-time.json"

    @property
    def ranks(self) -> Path:
        """Where each rank of this attempt runs, once all have met."""
        return self.path / "ranks.json"

    @property
    def step(self) -> Path:
        """The id of the step of Slurm that the tasks of this attempt are, such as ``123.0``."""
        return self.path / "step"

    @property
    def requeue_file(self) -> Path:
        """The file that a program of the user's own creates to request a requeue."""
        return self.path / "requeue"

    @property
    def requeue_request(self) -> Path:
        """The run's user's request to save and requeue it."""
        return self.path / "requeue-requested.json"

    def rank_world(self, rank: int) -> Path:
        """Return the file in which one rank of a command reports that its program has started a world of its own."""
        return self.path / f"world-rank-{rank}.json"

    def rank_exit(self, rank: int) -> Path:
        """Return the record of how one rank's program ended."""
        return self.path / f"exit-rank-{rank}.json"

    def rank_exit_reserve(self, rank: int) -> Path:
        """Return the reserve file for that record."""
        return self.path / f".exit-rank-{rank}.reserve"

    def rank_log(self, rank: int) -> Path:
        """Return the log of one rank."""
        return self.path / f"rank-{rank}.log"

    def rank_logs(self) -> dict[int, Path]:
        """Return the logs that there are, by rank."""
        matches = ((_RANK_LOG.fullmatch(path.name), path) for path in self.path.glob("rank-*.log"))
        return {int(match[1]): path for match, path in matches if match is not None}

    def rank_error(self, rank: int) -> Path:
        """Return the error record of one rank."""
        return self.path / f"error-rank-{rank}.json"

    def rank_wait(self, rank: int) -> Path:
        """Return the mark of a rank that waits for other ranks; its time is when the rank left it last."""
        return self.path / f"waits-rank-{rank}"

    def rank_collectives(self, rank: int) -> Path:
        """Return the trace of the collectives of one rank, as torch's flight recorder had it when the rank hung."""
        return self.path / f"collectives-rank-{rank}.json"

    @property
    def torch_traces(self) -> str:
        """The beginning of the names of the traces that torch itself writes at a timeout of NCCL."""
        return str(self.path / "torch-trace-rank-")
