"""A run that goes on with another number of ranks, through checkpoints and restarts on a real Slurm."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hpcddp.run.directory import RunDirectory
from hpcddp.run.job_records import known_hosts, read_start
from tests.cluster.commands import script, start
from tests.cluster.jobs import HPCDDP, finished, result_of, submit, write_job
from tests.cluster.sandboxes import QUICK, sandbox_with
from tests.waiting import wait_for_text, wait_until

if TYPE_CHECKING:
    import torch

    from tests.cluster.sandbox import Sandbox

# Slow enough to be cancelled on the way.
SLOW_MODEL = """
import time
from torch import nn

class Slow(nn.Sequential):
    def forward(self, images):
        time.sleep(0.03)
        return super().forward(images)

def build(num_classes):
    return Slow(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(192, 16), nn.Tanh(), nn.Linear(16, num_classes))
"""
# 1,437 digits in batches of 64: 23 steps per epoch, and a save every 5 steps.
SAVES = {"checkpoint": {"every": {"steps": 5}, "keep": 30}}


def go_on(sandbox: Sandbox, job: Path, run: RunDirectory, *options: str) -> str:
    """Start the run again as a person would, with other resources, and return the job id."""
    script = job.with_name("again.sbatch")
    words = [word for option in options for word in ("--set", option)]
    sandbox.run(*HPCDDP, "render", str(job), "--run-id", run.run_id, *words, "-o", str(script), cwd=job.parent)
    return sandbox.submit(script, cwd=job.parent)


def cancel_after(sandbox: Sandbox, job_id: str, run: RunDirectory, step: int) -> None:
    """Cancel the job as soon as the state after ``step`` or a later one is saved."""
    wait_until_saved(run, step)
    sandbox.run("scancel", job_id)
    sandbox.wait(job_id, states={"CANCELLED"})


def wait_until_saved(run: RunDirectory, step: int) -> None:
    """Wait until the state after ``step`` or a later one is saved."""

    def is_saved() -> bool:
        return max((int(path.name[-6:]) for path in run.checkpoints.glob("step-??????")), default=0) >= step

    wait_until(is_saved, f"step {step} of {run.path}", 120)


def weights(run: RunDirectory, step: int) -> torch.Tensor:
    # Not above: every process of the tests collects this file.
    import torch

    state = torch.load(run.checkpoints / f"step-{step:06d}" / "model.pt", weights_only=True)
    return torch.cat([tensor.reshape(-1) for tensor in state.values()])


def losses(run: RunDirectory) -> list[dict[str, Any]]:
    return [record for line in run.metrics.read_text().splitlines() if "loss" in (record := json.loads(line))]


def test_run_of_three_ranks_goes_on_with_two_as_if_it_had_been_one(
    sandbox: Sandbox, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    (tmp_path / "small.py").write_text(SLOW_MODEL)
    job = write_job(tmp_path, nodes=2, tasks=1, epochs=3, sections=SAVES)
    one = submit(sandbox, job, "--set", "resources.nodes=1")
    submitted = submit(sandbox, job, "--set", "resources.nodes=3")
    run = RunDirectory(Path(submitted["run_dir"]))
    cancel_after(sandbox, submitted["job_id"], run, 10)
    with subtests.test("it does not go on with another training"):
        job_id = go_on(sandbox, job, run, "batch.global_batch_size=65")
        sandbox.wait(job_id, states={"FAILED"})
        assert "batch.global_batch_size is 64 there and 65 here, and such a change is made only if" in (
            run.batch_log.read_text()
        )
        assert run.newest_attempt() == 0
    finished(sandbox, go_on(sandbox, job, run, "batch.max_per_device_batch_size=20"))
    finished(sandbox, one["job_id"])
    expected = RunDirectory(Path(one["run_dir"]))
    result = result_of(run)
    assert (result["attempts"], result["world_size"], result["steps"]) == (2, 2, 69)
    assert float((weights(run, 69) - weights(expected, 69)).abs().max()) <= 1e-12
    for name in ("step", "loss", "lr", "samples_seen"):
        pairs = zip(losses(run), losses(expected), strict=True)
        assert max(abs(found[name] - wanted[name]) for found, wanted in pairs) <= 1e-12


# It says its share of the batch, and is at work until it is asked to stop; it ends in the second attempt.
SHARES = """
    import os, signal, sys, time
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    rank, ranks, share = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "HPCDDP_RANK_BATCH_SIZE"))
    print(f"rank {rank} of {ranks} has {share}", flush=True)
    if os.environ["HPCDDP_ATTEMPT"] == "0":
        time.sleep(600)
"""


def test_a_job_of_two_to_four_nodes_starts_with_two_and_goes_on_with_four(tmp_path: Path) -> None:
    words = ("--nodes", "2-4", "--time", "10", "--global-batch-size", "96")
    with sandbox_with(*QUICK) as sandbox:
        other = sandbox.submit("--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 600")
        sandbox.wait(other, states={"RUNNING"})
        tracked = start(sandbox, tmp_path, *words, "--", sys.executable, script(tmp_path, SHARES))
        run = tracked.run
        for rank in range(2):
            wait_for_text(run.attempt(0).rank_log(rank), f"rank {rank} of 2 has 48\n")
        sandbox.run("scancel", other)
        sandbox.run(*HPCDDP, "requeue", str(run.path))
        tracked.wait_until_finished(timeout_s=240)
    for rank in range(4):
        assert f"rank {rank} of 4 has 24\n" in run.attempt(1).rank_log(rank).read_text()
    starts = [read_start(run.attempt(number)) for number in range(2)]
    assert [record.nodes for record in starts if record is not None] == [2, 4]
    assert [len(set(known_hosts(run.attempt(number)) or [])) for number in range(2)] == [2, 4]
    assert 'nodes: "2-4"' in run.job_file.read_text()
    assert (tracked.result["attempts"], tracked.result["world_size"]) == (2, 4)
