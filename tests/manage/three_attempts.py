"""A run of three attempts, written by hand so that every number of its report is known.

It is queued at 0 s. Attempt 0 (4 ranks, 100 s to 390 s) begins to train at 130 s: 20 steps of 10 s; saves after steps
10 and 20 stop it for 1 s each; it fails at 386 s after step 25, so that 54 s are lost. Attempt 1 (4 ranks, 500 s to
730 s) goes on from step 20 at 520 s: 20 steps of 10 s, an evaluation of 5 s after step 30, a save of 3 s at its stop at
728 s. Attempt 2 (8 ranks, 900 s to 1020 s) goes on from step 40 at 915 s: 20 steps of 5 s and a last save of 5 s. Each
attempt waited 0.3 s for data in 19 of its steps, on rank 1.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpcddp.jobfile.read import load_job
from hpcddp.jobfile.write import dump_job
from hpcddp.run.job_records import write_plan_record
from tests.manage.runs import NOON, FakeRun, make

JOB = """\
name: digits
resources: {nodes: 1, gpus_per_node: 4, time_limit: 1h}
batch: {global_batch_size: 64}
train: {model: resnet18, dataset: digits, epochs: 3}
"""
RANK_SECONDS = {
    "queue": 100 * 4 + 110 * 4 + 170 * 8,
    "start_up": 30 * 4 + 20 * 4 + 15 * 8,
    "training": 200 * 4 + 200 * 4 + 100 * 8,
    "lost": 54 * 4,
    "evaluation": 5 * 4,
    "save": 2 * 4 + 3 * 4 + 5 * 8,
    "stop": 4 * 4 + 2 * 4,
}
ON_NODES = 290 * 4 + 230 * 4 + 120 * 8
TRACEBACK = 'Traceback (most recent call last):\n  File "/home/you/model.py", line 54, in forward\nIndexError: 10 > 9\n'


def three_attempts(root: Path, run_id: str = "run-1", name: str = "digits") -> FakeRun:
    """Write the run."""
    made = make(root, run_id, name).submitted(at=0)
    (root / "job.yaml").write_text(JOB)
    made.run.job_file.write_text(dump_job(load_job(root / "job.yaml").spec, environment_values=False))
    write_plan_record(made.run, {"total_steps": 60})
    _attempt(made, 0, began=100, trained=130, step=0, ranks=4)
    _steps(made, 1, 10, at=140, seconds=10)
    _account(made, 10, at=231, train_s=100, save_s=1)
    made.event("save", at=233, step=10, seconds=3.0, blocked_s=1.0)
    _steps(made, 11, 20, at=241, seconds=10)
    _account(made, 20, at=332, train_s=200, save_s=2)
    made.event("save", at=334, step=20, seconds=3.0, blocked_s=1.0)
    made.failed(2, at=386, step=25, kind="IndexError", message="10 > 9", traceback=TRACEBACK)
    made.event("requeue", at=390, cause="crash", by="hpcddp")
    _attempt(made, 1, began=500, trained=520, step=20, ranks=4)
    _steps(made, 21, 30, at=530, seconds=10)
    _evaluation(made, 30, 0.75, 5.0)
    _steps(made, 31, 40, at=635, seconds=10)
    _account(made, 40, attempt=1, at=725.5, train_s=200, eval_s=5, save_s=0.5)
    made.event("save", at=728, attempt=1, step=40, seconds=3.0, blocked_s=0.5)
    made.event("stop", at=728, attempt=1, step=40, saved=True, save_s=3.0, cause="preemption", reason="terminated")
    made.event("requeue", at=730, attempt=1, step=40, cause="preemption", by="hpcddp")
    _attempt(made, 2, began=900, trained=915, step=40, ranks=8)
    _steps(made, 41, 60, at=920, seconds=5)
    _evaluation(made, 60, 0.7, 0.0)
    _account(made, 60, attempt=2, at=1016, train_s=100, save_s=1)
    made.event("save", at=1019, attempt=2, step=60, seconds=4.0, blocked_s=1.0)
    made.event("finish", at=1020, attempt=2, step=60)
    return made.ended("finished", steps=60, val_accuracy=0.7, attempts=3, world_size=8)


def _attempt(made: FakeRun, number: int, *, began: int, trained: int, step: int, ranks: int) -> None:
    made.started(at=began, attempt=number).event("train", at=trained, attempt=number, step=step)
    document = {"format": 1, "ranks": [{"host": "n1", "gpu": f"GPU-{rank}"} for rank in range(ranks)]}
    made.attempt(number).ranks.write_text(json.dumps(document))


def _account(made: FakeRun, step: int, *, at: float, train_s: float, **facts: Any) -> None:
    slowest = {"rank": 1, "data_wait_s": 0.3, "forward_s": 2.0, "median_s": 2.1}
    made.account(step, at=at, train_s=train_s, wait_s=19 * 0.3, slowest=slowest, **facts)


def _steps(made: FakeRun, first: int, last: int, *, at: float, seconds: float) -> None:
    made.steps(first, last, at=at, seconds=seconds)


def _evaluation(made: FakeRun, step: int, accuracy: float, seconds: float) -> None:
    document = {"step": step, "epoch": 0, "val_loss": 1 - accuracy, "val_accuracy": accuracy, "val_samples": 360}
    with made.run.metrics.open("a") as stream:
        stream.write(json.dumps({**document, "eval_s": seconds}) + "\n")


def moment(seconds: float) -> float:
    """Return a time of the run in seconds since the epoch."""
    return NOON + seconds
