"""Runs on this machine with two real ranks, and what becomes of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcddp.rehearse.faults import TASK, processes_of
from hpcddp.run.directory import AttemptDirectory, RunDirectory
from hpcddp.run.events import Event, EventKind, read_events
from hpcddp.run.failure import read_failures
from hpcddp.run.job_records import Decision, FailureRecord, read_decision
from tests.command_line import hpcddp
from tests.waiting import wait_until, wait_until_gone

ROOT = Path(__file__).parents[2]
MODEL = """
import json, os, signal, time
from pathlib import Path
from torch import nn

class Slow(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.net = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(192, num_classes))

    def forward(self, x):
        time.sleep(0.02)
        return self.net(x)

def build(num_classes):
    handlers = {number.name: signal.getsignal(number) for number in signal.valid_signals() if hasattr(number, "name")}
    named = {name: getattr(handler, "__qualname__", str(handler)) for name, handler in handlers.items()}
    Path(f"handlers-{os.environ['RANK']}.json").write_text(json.dumps(named))
    return Slow(num_classes)
"""
JOB = """
name: local
resources: {tasks_per_node: 2}
environment: {env: {HPCDDP_FAULTS: "TEXT", OMP_NUM_THREADS: "1"}}
batch: {global_batch_size: 64}
learning_rate: {base: 0.1}
train: {model: "small:build", dataset: digits, epochs: 40}
trackers: {use: []}
launch: {hang_timeout: 5min}
"""
_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class LocalRun:
    """A run that was handed over."""

    run: RunDirectory
    job_id: int

    @property
    def attempt(self) -> AttemptDirectory:
        return self.run.attempt(0)

    @property
    def result(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.run.result.read_text(encoding="utf-8"))
        return document

    @property
    def decision(self) -> Decision | None:
        return read_decision(self.attempt)

    @property
    def failures(self) -> list[FailureRecord]:
        return read_failures(self.attempt)

    def events(self, kind: EventKind) -> list[Event]:
        return [event for event in read_events(self.run.events) if event.kind == kind]

    def log(self, rank: int) -> str:
        return self.attempt.rank_log(rank).read_text(encoding="utf-8")

    def steps(self) -> list[int]:
        """Return the steps on record, in their order."""
        lines = self.run.metrics.read_text(encoding="utf-8").splitlines() if self.run.metrics.exists() else []
        return [record["step"] for record in map(json.loads, lines) if "loss" in record]

    def tasks(self) -> dict[int, int]:
        """Return the process id of each rank that runs."""
        return processes_of(self.attempt, TASK)

    def wait_until_it_trains(self) -> None:
        wait_until(self.steps, "the first step", _TIMEOUT_S)

    def signal(self, rank: int, signum: signal.Signals) -> None:
        os.kill(self.tasks()[rank], signum)

    def wait_for_end(self) -> None:
        wait_until_gone(self.job_id, _TIMEOUT_S)


@contextmanager
def script_process() -> Iterator[subprocess.Popen[bytes]]:
    """Keep a process that has the command line of a batch script."""
    words = [sys.executable, "-c", "import time; time.sleep(600)", "/moved/r1/job.sbatch"]
    with subprocess.Popen(words) as process:
        # The kernel shows the command line a moment after the start.
        wait_until(Path(f"/proc/{process.pid}/cmdline").read_bytes, "the command line", _TIMEOUT_S)
        yield process
        process.kill()


def start(directory: Path, faults: str = "", **lines: str) -> LocalRun:
    """Hand over a job of two ranks; ``lines`` replaces whole lines of the job file, by their first word."""
    (directory / "small.py").write_text(MODEL)
    job = JOB.replace("TEXT", faults)
    for key, line in lines.items():
        job = "\n".join(line if text.startswith(f"{key}:") else text for text in job.splitlines())
    if not faults:
        job = job.replace('HPCDDP_FAULTS: "", ', "")
    (directory / "job.yaml").write_text(job)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = hpcddp(directory, "submit", "job.yaml", "--cluster", "local", "--json", environment=environment)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    return LocalRun(RunDirectory(Path(answer["run_dir"])), int(answer["job_id"]))
