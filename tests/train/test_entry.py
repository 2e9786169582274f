"""A function of the user's own as the work of a run: real ranks on this machine."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcddp import Context
from hpcddp.jobfile.job import JobSpec
from hpcddp.run.checkpoints import list_checkpoints
from hpcddp.run.directory import RunDirectory
from hpcddp.run.job_records import read_decision
from hpcddp.train.context import TrainContext
from hpcddp.train.entry import run_entrypoint
from hpcddp.train.errors import UserCodeError
from tests.command_line import hpcddp
from tests.messages import GoldenMessages
from tests.submission.local_commands import ended, result
from tests.train.conftest import Training
from tests.waiting import wait_for_text

MODULE = """
import os, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import hpcddp
from hpcddp.train.model.replica import leave_compiler_out

def facts(context: hpcddp.Context):
    context.logger.info("this is a word of mine")
    total = torch.tensor(float(context.rank))
    dist.all_reduce(total, group=context.process_group)
    for step in range(1, 4):
        context.log(torch.tensor(step), loss=torch.tensor(0.5), right=3)
    return {
        "sum of ranks": total.item(),
        "world": context.world_size,
        "device": str(context.device),
        "shares": context.plan and list(context.plan.batch.per_rank_samples),
        "attempt": context.attempt,
        "name": context.spec.name,
        "directory": context.run_dir.name,
    }

def train(context: hpcddp.Context):
    # Loading torch's compiler would take longer than the training.
    leave_compiler_out()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    checkpointer = context.checkpointer({"model": model, "optimizer": optimizer})
    for step in range(checkpointer.restore().step, 60):
        optimizer.zero_grad()
        loss = model(torch.full((2, 4), float(step % 7)).double()).square().mean()
        loss.backward()
        optimizer.step()
        context.log(step + 1, loss=loss.item())
        time.sleep(float(os.environ.get("PAUSE", "0")))
        if context.stopper.should_stop():
            checkpointer.save(step + 1)
            checkpointer.wait()
            context.stopper.exit()
    return {"loss": loss.item(), "attempt": context.attempt}

def fails(context: hpcddp.Context):
    if context.rank == 1:
        raise ValueError("my own mistake")
    dist.barrier()
"""

ALONE = ("--tasks-per-node", "1")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MODULE)
    return tmp_path


def submit(directory: Path, function: str, *words: str, pause: float = 0.0, batch: str = "{}") -> dict[str, Any]:
    job = directory / "job.yaml"
    job.write_text(
        f"name: fn\nresources: {{tasks_per_node: 2}}\nbatch: {batch}\nentrypoint: mine:{function}\n"
        "trackers: {use: []}\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PAUSE": str(pause)}
    done = hpcddp(directory, "submit", job, "--cluster", "local", "--json", *words, environment=environment)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


async def later(_: Context) -> int:
    return 1


def odd(context: Context) -> dict[str, Any]:
    return {"without a batch": context.plan, "a set": {1, 2}}


def test_a_function_is_told_who_it_is_and_what_it_logs_and_returns_is_kept(directory: Path) -> None:
    run = ended(submit(directory, "facts", batch="{global_batch_size: 65}"))
    assert result(run)["returned"] == {
        "sum of ranks": 1.0,
        "world": 2,
        "device": "cpu",
        "shares": [33, 32],
        "attempt": 0,
        "name": "fn",
        "directory": run.run_id,
    }
    assert result(run)["status"] == "finished"
    assert "rank 1 INFO this is a word of mine" in run.attempt(0).rank_log(1).read_text()
    # Numbers of a device can be logged.
    records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [(record["step"], record["loss"], record["right"]) for record in records] == [
        (1, 0.5, 3), (2, 0.5, 3), (3, 0.5, 3),
    ]  # fmt: skip
    shown = hpcddp(directory, "status", run.path, "--json")
    assert json.loads(shown.stdout)["runs"][0]["step"] == 3


@pytest.mark.long("tests/cluster/test_commands.py preempts a function")
def test_a_stopped_function_goes_on_and_comes_out_the_same(directory: Path) -> None:
    # Two ranks with the same samples have the gradient of one.
    reference = result(ended(submit(directory, "train", *ALONE)))["returned"]["loss"]
    document = submit(directory, "train", pause=0.1)
    run = RunDirectory(Path(document["run_dir"]))
    wait_for_text(run.metrics, '"step"')
    os.kill(int(document["job_id"]), signal.SIGTERM)
    ended(document)
    decision = read_decision(run.attempt(0))
    assert decision is not None
    assert 0 < decision.step < 60
    assert decision.saved
    assert [path.name for path in list_checkpoints(run.checkpoints)] == [f"step-{decision.step:06d}"]
    again = ["--resume", str(run.path)]
    assert result(ended(submit(directory, "train", *again)))["returned"] == {"loss": reference, "attempt": 1}
    steps = [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()]
    assert steps == list(range(1, 61))


@pytest.mark.long("tests/cluster/test_stop_failures.py names the first rank that fails")
def test_an_exception_of_a_function_is_named_with_its_rank(directory: Path) -> None:
    run = ended(submit(directory, "fails"))
    assert result(run)["exit_code"] == 70
    assert result(run)["reason"].endswith("failed first: ValueError: my own mistake")


def context_of(training: Training, function: str) -> TrainContext:
    training.run.attempt(0).path.mkdir(parents=True)
    spec = JobSpec.model_validate({"name": "fn", "entrypoint": f"{__name__}:{function}", "trackers": {"use": []}})
    return replace(training.context(), spec=spec)


def test_what_json_cannot_hold_is_not_kept_and_the_log_says_so(golden: GoldenMessages, training: Training) -> None:
    run_entrypoint(context_of(training, "odd"))
    assert (result(training.run)["status"], result(training.run)["returned"]) == ("finished", None)
    _, _, warning = "\n".join(training.said).partition("warning: ")
    assert "not kept in result.json" in golden.message(warning.partition("\n")[0])


def test_a_function_that_runs_nothing_when_it_is_called_is_refused(training: Training) -> None:
    with pytest.raises(UserCodeError, match="async function or a generator"):
        run_entrypoint(context_of(training, "later"))
