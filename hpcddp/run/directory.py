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


class _File:
    """A file or a folder of a directory.

    Args:
        name: its name there.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, directory: RunDirectory | AttemptDirectory, owner: type) -> Path:
        """Return its path."""
        return directory.path / self._name


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
    def name_of_chain(self) -> str:
        """The name in Slurm of the jobs of its chain."""
        return f"{self.name}-{self.run_id}"

    @property
    def run_root(self) -> Path:
        """The directory of all runs, ``run_root`` in the job file."""
        return self.path.parent.parent

    job_file = _File("job.yaml")
    """The resolved job, as every task reads it."""
    plan = _File("plan.json")
    """The batch plan."""
    script = _File("job.sbatch")
    """The script that was submitted."""
    exported_values = _File("environment.json")
    """The values of ``environment.env`` that the script exports, which the resolved job leaves out."""
    submission = _File("submission.json")
    """The submission: the cluster, the job id, the directory of submission, the interpreter."""
    source = _File("source.json")
    """The commit, the uncommitted changes and the package versions at each submission."""
    code = _File("code.json")
    """The code files of the project at the submission, with their hashes; an element has those of its sweep."""
    code_copies = _File("code")
    """The copies of the project's code that ``environment.code: snapshot`` makes, a directory for each."""
    batch_log = _File("batch.log")
    """What the batch script itself printed, over all attempts."""
    submitit = _File("submitit")
    """The folder that submitit keeps its pickles in."""
    events = _File("events.jsonl")
    """The run's own event log."""
    metrics = _File("metrics.jsonl")
    """One line per optimizer step and per evaluation."""
    tensorboard = _File("tensorboard")
    """The folder that TensorBoard shows."""
    wandb = _File("wandb")
    """The folder that W&B writes into."""
    trackers = _File("trackers")
    """The folder with the position of each tracker."""

    def tracker(self, name: str) -> Path:
        """Return the file with a tracker's name for this run and the last step sent to it."""
        return self.trackers / f"{name}.json"

    checkpoints = _File("checkpoints")
    """The folder of checkpoints."""
    result = _File("result.json")
    """The result of the run; written when it ends and is not requeued."""

    def reserves(self, record: ReservedRecord) -> tuple[Path, ...]:
        """Return the reserve files of a kind of record: two, because a result may follow a provisional one.

        Of a meeting there are two records: the address of rank 0, and where all ranks run.
        """
        return tuple(self.path / "reserve" / f"{record}-{number}" for number in range(2))

    def refusal(self, job_id: str | None) -> Path:
        """Return the record of why a job may not use the directory."""
        return self.path / f"refused-{job_id}.json"

    progress = _File("progress")
    """The file that a program of the user's own touches when it has made progress."""
    sweep_manifest = _File("sweep.json")
    """The elements and the job arrays of a sweep; only the directory of a sweep has it, as the next two."""
    sweep_logs = _File("logs")
    """Where the batch scripts of the elements of a sweep write, a file for each."""
    sweep_turns = _File("turns")
    """The locks of the elements of a sweep on this machine."""
    attempts = _File("attempts")
    """The folder of attempts."""

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

    start = _File("start.json")
    """Who started this attempt: job id, restart count, submit time, token."""
    rendezvous = _File("rendezvous.json")
    """Where rank 0 of this attempt listens."""
    decision = _File("decision.json")
    """Where this attempt's ranks agreed to stop, and why."""
    end_time = _File("end-time.json")
    """The end of the job as rank 0 of a command has asked Slurm for it."""
    ranks = _File("ranks.json")
    """Where each rank of this attempt runs, once all have met."""
    step = _File("step")
    """The id of the step of Slurm that the tasks of this attempt are, such as ``123.0``."""
    requeue_file = _File("requeue")
    """The file that a program of the user's own creates to request a requeue."""
    requeue_request = _File("requeue-requested")
    """The run's user's request to save and requeue it."""

    def rank_world(self, rank: int) -> Path:
        """Return the file in which one rank of a command reports that its program has started a world of its own."""
        return self.path / f"world-rank-{rank}"

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
