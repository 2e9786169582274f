"""An attempt of a run, and what happens to it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hpcddp.jobfile.read import load_job
from hpcddp.jobfile.write import dump_for_script
from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.events import Event, EventKind, append_event, read_events
from hpcddp.run.failure import beginning, write_failure
from hpcddp.run.files import read_json, write_json
from hpcddp.run.job_records import Decision, FailureRecord, ProgramExit, StopNotice, write_decision, write_exit
from hpcddp.stop.reasons import StopReason
from hpcddp.supervise import end as supervisor
from hpcddp.supervise.begin import begin
from hpcddp.supervise.end import Ending

SLURM = {"SLURM_JOB_ID": "7"}
LOCAL = {"HPCDDP_LOCAL_JOB_ID": str(os.getpid())}
JOB = """
name: demo
resources: {nodes: 2, tasks_per_node: 1, time_limit: 10}
batch: {global_batch_size: 8}
train: {model: resnet18, dataset: digits}
"""
PREEMPTED = {"PreemptTime": "2026-01-01T00:00:00"}
COMMAND = """
name: demo
resources: {nodes: 2, tasks_per_node: 1, time_limit: 10}
command: [python, train.py]
"""


class Scenario:
    """An attempt, and what happens to it."""

    def __init__(self, directory: Path, environment: dict[str, str], more: str = "", job: str = JOB) -> None:
        path = directory / "job.yaml"
        path.write_text(job + more)
        self.environment = environment
        self.may_restart = True
        self.directory = directory
        self.text = dump_for_script(load_job(path).spec)
        self.attempt = self.begin(environment)
        write_json(self.attempt.run.submission, {})
        for rank in range(2):
            self.attempt.rank_log(rank).touch()

    def begin(self, environment: dict[str, str]) -> AttemptDirectory:
        text = begin(
            run_root=str(self.directory / "runs"),
            name="demo",
            run_id="r1",
            job_text=self.text,
            environment=environment,
        )
        return AttemptDirectory.from_text(text)

    def stop(
        self,
        *,
        step: int = 12,
        reason: StopReason = StopReason.TERMINATED,
        cause: str | None = "preemption",
        saved: bool = True,
    ) -> None:
        """The ranks have agreed to stop."""
        if saved:
            append_event(self.attempt.run.events, kind="save", time=0.0, attempt=self.attempt.number, step=step)
        append_event(
            self.attempt.run.events, kind="stop", time=0.0, attempt=self.attempt.number, step=step, cause=cause
        )
        self.decide(step=step, reason=reason, cause=cause, saved=saved)

    def decide(
        self,
        *,
        step: int = 12,
        reason: StopReason = StopReason.TERMINATED,
        cause: str | None = "preemption",
        saved: bool = True,
    ) -> None:
        """Rank 0 has written the decision."""
        write_decision(
            self.attempt,
            Decision(
                attempt=self.attempt.number, step=step, reason=reason, cause=cause, saved=saved, save_s=0.4, time=0.0
            ),
        )

    def fail(self, rank: int, *, exit_code: int, secondary: bool = False, waiting: bool = False) -> None:
        """A rank has failed."""
        record = FailureRecord(
            rank=rank,
            host=f"n{rank + 1}",
            time=1.0 + rank,
            kind="ValueError",
            message="boom",
            traceback="Traceback",
            exit_code=exit_code,
            secondary=secondary,
            waiting=waiting,
        )
        write_failure(self.attempt, record)

    def end(self, *, code: int = 137, cancelled: bool = False) -> Ending:
        return supervisor.end(
            self.attempt, code=code, environment=self.environment, cancelled=cancelled, may_restart=self.may_restart
        )

    @property
    def result(self) -> dict[str, Any] | None:
        document: dict[str, Any] | None = read_json(self.attempt.run.result)
        return document

    @property
    def resume(self) -> str:
        return f"hpcddp submit --resume {self.attempt.run.path}"

    def events(self) -> list[tuple[str, str | None]]:
        return [(event.kind, event.cause) for event in read_events(self.attempt.run.events)]


class Command(Scenario):
    """An attempt of a command."""

    def __init__(self, directory: Path, environment: dict[str, str], more: str = "") -> None:
        super().__init__(directory, environment, more, job=COMMAND)

    def leave(self, *codes: int, notice: StopNotice | None = None) -> None:
        """The programs of the first ranks have ended."""
        append_event(self.attempt.run.events, kind="train", time=0.0, attempt=self.attempt.number)
        for rank, code in enumerate(codes):
            write_exit(self.attempt, ProgramExit(rank=rank, host="n1", time=0.0, code=code, notice=notice))

    def slurm_says(self, why: str) -> None:
        """slurmstepd writes into the batch log."""
        notice = f"slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-22T05:17:38 DUE TO {why} ***\n"
        with self.attempt.run.batch_log.open("a") as log:
            log.write(f"{beginning(self.attempt)}{notice}")

    def last(self, kind: EventKind) -> Event:
        return [event for event in read_events(self.attempt.run.events) if event.kind == kind][-1]
