"""Writes run directories as runs leave them, without running anything."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcddp.run.directory import AttemptDirectory, RunDirectory
from hpcddp.run.events import EventKind, append_event
from hpcddp.run.failure import write_failure
from hpcddp.run.job_records import (
    FailureRecord,
    Start,
    SubmissionRecord,
    write_plan_record,
    write_start,
    write_submission_record,
)
from hpcddp.run.record import FORMAT, write_record
from hpcddp.run.result import Result
from hpcddp.slurm.commands import QueuedJob

# 2026-11-21 12:00:00 where the tests run; all times are seconds after it.
NOON = 1795262400.0
TOTAL = 400


@dataclass(frozen=True)
class FakeRun:
    """A run directory that a test writes; the methods may be chained."""

    run: RunDirectory
    facts: dict[str, Any] = field(default_factory=dict)

    def submitted(self, job_id: str = "7", *, at: float = 0, cluster: str = "slurm", **facts: Any) -> FakeRun:
        """Write what a submission writes."""
        self.run.path.mkdir(parents=True, exist_ok=True)
        self.run.script.write_text("#!/bin/bash\n")
        write_plan_record(self.run, {"total_steps": TOTAL})
        record: dict[str, Any] = {
            "cluster": cluster, "job_id": job_id, "directory": "/", "python": "python", "time": NOON + at,
            "host": socket.gethostname(), "run_dir": str(self.run.path), **facts,
        }  # fmt: skip
        write_submission_record(self.run, SubmissionRecord(**record))
        return self

    def started(self, job_id: str = "7", *, at: float = 10, attempt: int = 0, **facts: Any) -> FakeRun:
        """Write what the batch script writes at its start."""
        directory = self.attempt(attempt)
        directory.path.mkdir(parents=True)
        record: dict[str, Any] = {
            "job_id": job_id, "restart_count": attempt, "host": "n1", "token": "x", "time": NOON + at,
            "is_local": False, **facts,
        }  # fmt: skip
        write_start(directory, Start(**record))
        return self.event("start", at=at, attempt=attempt, job_id=job_id, host=record["host"])

    def event(self, kind: EventKind, *, at: float = 20, attempt: int = 0, **facts: Any) -> FakeRun:
        """Append an event."""
        append_event(self.run.events, kind=kind, time=NOON + at, attempt=attempt, **facts)
        return self

    def steps(self, first: int, last: int, *, at: float = 20, seconds: float = 1.0) -> FakeRun:
        """Append the records of steps."""
        lines = [
            json.dumps({"step": step, "loss": 1 / step, "samples_seen": 64 * step, "samples_per_s": 64.0 / seconds,
                        "time": NOON + at + (step - first) * seconds})
            for step in range(first, last + 1)
        ]  # fmt: skip
        with self.run.metrics.open("a") as stream:
            stream.write("\n".join(lines) + "\n")
        return self

    def account(self, step: int, *, at: float, attempt: int = 0, train_s: float, **facts: Any) -> FakeRun:
        """Append what rank 0 records at a save."""
        known = {"eval_s": 0.0, "save_s": 0.0, "wait_s": 0.0, "slowest": None, **facts}
        return self.event("account", at=at, attempt=attempt, step=step, train_s=train_s, **known)

    def ended(self, status: str, **facts: Any) -> FakeRun:
        """Write the result."""
        write_record(self.run.result, Result.from_document({"format": FORMAT, "status": status, **facts}))
        return self

    def failed(self, rank: int, *, attempt: int = 0, at: float = 30, **facts: Any) -> FakeRun:
        """Write the record of a rank's failure."""
        record: dict[str, Any] = {
            "rank": rank, "host": f"n{rank // 4 + 1}", "time": NOON + at, "kind": "ValueError", "message": "no",
            "traceback": "", "exit_code": 70, "secondary": False, **facts,
        }  # fmt: skip
        write_failure(self.attempt(attempt), FailureRecord(**record))
        return self

    def log(self, rank: int, text: str, *, attempt: int = 0) -> FakeRun:
        """Write a rank's log."""
        self.attempt(attempt).rank_log(rank).write_text(text)
        return self

    def attempt(self, number: int = 0) -> AttemptDirectory:
        return self.run.attempt(number)


def make(root: Path, run_id: str = "run-1", name: str = "digits") -> FakeRun:
    """Create the directory of a run under a run root."""
    made = FakeRun(RunDirectory(root / name / run_id))
    made.run.path.mkdir(parents=True)
    return made


def queued(job_id: str = "7", state: str = "RUNNING", **facts: Any) -> QueuedJob:
    """Return a job as squeue shows it."""
    return QueuedJob(job_id=job_id, state=state, **facts)
