"""The runs that docs/life-of-a-run.md shows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hpcddp.run.directory import times_of
from hpcddp.run.job_records import Rank, write_ranks
from hpcddp.run.sweep import Chunk, Sweep, write_sweep
from hpcddp.slurm.commands import QueuedJob
from tests.manage.runs import NOON, FakeRun, make, queued

NOW = NOON + 1800
TRACEBACK = """\
Traceback (most recent call last):
  File "/venv/lib/python3.12/site-packages/torch/nn/modules/module.py", line 1787, in _call_impl
    return forward_call(*args, **kwargs)
  File "/home/you/project/model.py", line 54, in forward
    return self.head(x[:, self.classes])
IndexError: index 10 is out of bounds for dimension 1 with size 10
"""
CLOSED = "[gloo/transport/tcp/pair.cc:561] Connection closed by peer [10.0.0.2]:16816."
MESSAGE = "index 10 is out of bounds for dimension 1 with size 10"
_RANKS = [Rank(host=f"n{rank // 4 + 1}") for rank in range(8)]


def example(root: Path) -> list[QueuedJob]:
    """Make the runs, and return what Slurm says of them."""
    jobs = [
        *_sweep(root),
        *_failed(root),
        *_running(root),
        *_waiting(root),
    ]
    submissions = sorted(root.glob("*/*/submission.json"), key=lambda path: path.parent.name)
    for place, path in enumerate(submissions):
        os.utime(path, (NOON + place, NOON + place))
    return jobs


def _made(root: Path, run_id: str, name: str, job_id: str) -> FakeRun:
    return make(root, run_id, name).submitted(job_id)


def _sweep(root: Path) -> list[QueuedJob]:
    made = _made(root, "20261121-084500-5e5e", "rates", "1240")
    elements = tuple({"learning_rate.base": rate, "train.seed": seed} for rate in (0.1, 0.2) for seed in range(8))
    chunks = (Chunk(job_id="1240", first=0, count=16),)
    sweep = Sweep(sweep_id=made.run.run_id, path=made.run.path, elements=elements, chunks=chunks)
    write_sweep(sweep)
    for index in range(12):
        element = make(root, sweep.run_id(index), "rates").submitted(f"1240_{index}").started(f"1240_{index}")
        if index == 2:
            element.ended("failed", reason="rank 0 on n7 failed first: DriftError: the loss is nan", exit_code=70)
        elif index < 4:
            element.steps(1, 400, seconds=3).event("finish", at=1230).ended("finished", steps=400)
        else:
            element.event("train").steps(1, 150 + 5 * index, at=890, seconds=6)
    running: dict[str, Any] = {"used_s": 900 + 10, "limit_s": 3600, "nodes": 1, "node_list": "n7"}
    waiting: dict[str, Any] = {"reason": "JobArrayTaskLimit", "limit_s": 3600, "nodes": 1}
    alive = [queued(f"1240_{index}", **running) for index in range(4, 12)]
    return [*alive, *(queued(f"1240_{index}", "PENDING", **waiting) for index in range(12, 16))]


def _failed(root: Path) -> list[QueuedJob]:
    made = _made(root, "20261121-090544-03bd", "digits", "1257").started("1257", at=60)
    made.event("train", at=70).steps(1, 20, at=80)
    write_ranks(made.attempt(), _RANKS)
    for rank in range(8):
        log = made.log(rank, "the log\n").attempt().rank_log(rank)
        os.utime(log, (NOON + 101, NOON + 101))
    for rank in (0, 1, 2, 4, 5, 6, 7):
        made.failed(rank, at=101, secondary=True, kind="RuntimeError", message=CLOSED, step=20, exit_code=71)
    made.failed(3, at=100, kind="IndexError", message=MESSAGE, traceback=TRACEBACK, step=20)
    made.event("failure", at=102, cause="crash")
    reason = f"rank 3 on n1 failed first after step 20: IndexError: {MESSAGE}"
    resume = "hpcddp submit --resume 20261121-090544-03bd"
    made.ended("failed", reason=reason, exit_code=70, saved_step=None, resume=resume)
    return []


def _running(root: Path) -> list[QueuedJob]:
    made = _made(root, "20261121-093012-a41f", "resnet50", "1260").started("1260", at=30)
    made.event("requeue", at=900, step=120, cause="preemption").started("1260", at=1000, attempt=1)
    made.event("train", at=1010, attempt=1).steps(121, 250, at=1020, seconds=6)
    for rank, text in enumerate(("epoch 3/5, step 250/400: loss 0.0040\n", "a warning of your own code\n")):
        log = made.log(rank, text, attempt=1).attempt(1).rank_log(rank)
        times_of(log).write_text(f"{len(text)} {NOON + 1790 + rank:.3f}\n")
    write_ranks(made.attempt(1), [Rank(host="n5"), Rank(host="n6")])
    return [queued("1260", restarts=1, used_s=800, limit_s=7200, nodes=2, node_list="n[5-6]")]


def _waiting(root: Path) -> list[QueuedJob]:
    _made(root, "20261121-101500-7c1e", "resnet50", "1263")
    start = "2026-11-21T14:30:00"
    return [queued("1263", "PENDING", reason="Resources", start_time=start, limit_s=7200, nodes=4)]
