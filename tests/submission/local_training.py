"""A training on this machine that the command line starts, follows and resumes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from hpcddp.run.directory import RunDirectory
from tests.command_line import hpcddp
from tests.waiting import wait_until

MODEL = """
import time
from torch import nn

class Slow(nn.Sequential):
    def forward(self, x):
        time.sleep(0.02)
        return super().forward(x)

def build(num_classes):
    return Slow(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(192, num_classes))
"""
JOB = """
name: again
resources: {tasks_per_node: 2}
batch: {global_batch_size: 64}
learning_rate: {base: 0.1}
train: {model: "slow:build", dataset: digits, epochs: 6}
trackers: {use: []}
"""


def write_job(directory: Path) -> Path:
    """Write ``job.yaml`` and its model, and return the directory."""
    (directory / "slow.py").write_text(MODEL)
    (directory / "job.yaml").write_text(JOB)
    return directory


def start(directory: Path, *words: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    return subprocess.Popen(
        [sys.executable, "-m", "hpcddp", "submit", *words],
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def submit(directory: Path, *words: str) -> tuple[int, str, str]:
    done = hpcddp(directory, "submit", *words)
    return done.returncode, done.stdout, done.stderr


def run_of(directory: Path) -> RunDirectory:
    (path,) = (directory / "runs" / "again").iterdir()
    return RunDirectory(path)


def wait_for_step(directory: Path, step: int) -> RunDirectory:
    def is_reached() -> bool:
        # The directory of the job is there a moment before that of its run.
        has_run = any((directory / "runs").glob("again/*"))
        return has_run and f'"step": {step},' in metrics_of(run_of(directory))

    wait_until(is_reached, f"step {step}", 180)
    return run_of(directory)


def metrics_of(run: RunDirectory) -> str:
    return run.metrics.read_text() if run.metrics.exists() else ""


def steps_of(run: RunDirectory) -> list[int]:
    records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return [record["step"] for record in records if "val_loss" not in record]
