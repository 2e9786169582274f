"""Launchers on the real Slurm: torchrun, accelerate and Lightning, in the tasks of a run and as its command."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.cluster.commands import RAISES, SAVES, script, start
from tests.cluster.jobs import HPCDDP
from tests.cluster.sandbox import Sandbox
from tests.waiting import wait_for_text

EXAMPLES = Path(__file__).parents[2] / "examples"
RANKS = {"rank 0 of 4", "rank 1 of 4", "rank 2 of 4", "rank 3 of 4"}


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        pytest.param(
            1,
            ("--global-batch-size", "64", "--", sys.executable, EXAMPLES / "torchrun_script.py"),
            marks=pytest.mark.depends_on(
                "examples/torchrun_script.py", "hpcddp/task", "pyproject.toml", "tests/cluster/test_launchers.py"
            ),
        ),
        pytest.param(
            2,
            ("--", sys.executable, EXAMPLES / "lightning_script.py", "--nodes", "2", "--devices", "2"),
            marks=pytest.mark.depends_on(
                "examples/lightning_script.py", "hpcddp/task", "pyproject.toml", "tests/cluster/test_launchers.py"
            ),
        ),
        pytest.param(
            2,
            ("--", sys.executable, EXAMPLES / "accelerate_script.py"),
            marks=pytest.mark.long("accelerate finds the same variables as torchrun's script"),
        ),
    ],
    ids=["torchrun", "Lightning", "accelerate"],
)
def test_a_script_for_another_launcher_runs_unchanged_on_two_hosts(
    sandbox: Sandbox, tmp_path: Path, tasks: int, words: tuple[str | Path, ...]
) -> None:
    tracked = start(sandbox, tmp_path, "--nodes", "2", "--tasks-per-node", str(tasks), "--time", "10", *words)
    tracked.wait_until_finished()
    said = re.findall(r"(rank \d of \d+):.* accuracy ([\d.]+)", tracked.log())
    at_the_end = {who: float(accuracy) for who, accuracy in said}
    ranks = 2 * tasks
    assert at_the_end.keys() == {f"rank {rank} of {ranks}" for rank in range(ranks)}
    # Beyond what a guess or a rank alone would give, and the same model on all of them.
    assert min(at_the_end.values()) > 0.85
    assert (tracked.result["status"], tracked.result["world_size"]) == ("finished", ranks)


LIGHTNING = """
import time
import lightning, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Slow(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
    def on_train_start(self):
        print(f"begins at {self.global_step}", flush=True)
    def training_step(self, batch, _):
        # Slurm of the sandbox signals this process itself too, and it ends after the step.
        time.sleep(0.5)
        print(f"step {self.global_step}", flush=True)
        return self.layer(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

trainer = lightning.Trainer(
    max_steps=STEPS, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False
)
trainer.fit(Slow(), DataLoader(TensorDataset(torch.ones(4000, 4)), batch_size=4))
"""


@pytest.mark.long("a program that saves at SIGTERM is requeued in test_commands.py")
@pytest.mark.parametrize(
    ("steps", "limit", "cause"),
    # Slurm may warn of the time limit half a minute earlier than the job asks for.
    [(50, "10", "preemption"), (250, "2", "time_limit")],
)
def test_lightning_resumes_without_a_change(
    sandbox: Sandbox, tmp_path: Path, steps: int, limit: str, cause: str
) -> None:
    program = script(tmp_path, LIGHTNING.replace("STEPS", str(steps)))
    # The controller is busy: Slurm's answers come late. Lightning ends after the step in which it gets SIGTERM.
    (tmp_path / "bin").mkdir()
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text(f'#!/bin/sh\n{shutil.which("scontrol")} "$@"\ncode=$?\nsleep 1\nexit $code\n')
    scontrol.chmod(0o755)
    slow = f"environment.setup=['export PATH={scontrol.parent}:$PATH']"
    place = ("--nodelist", "n1", "--partition", "low", "--time", limit)
    words = (*place, "--set", slow, "--set", "requeue.signal_lead=20s", "--", sys.executable, program)
    tracked = start(sandbox, tmp_path, *words)
    logs = [tracked.run.attempts / str(attempt) / "rank-0.log" for attempt in range(2)]
    wait_for_text(logs[0], "step 20\n")
    if cause == "preemption":
        sandbox.submit("--partition=high", "--exclusive", "--nodelist=n1", "--output=/dev/null", "--wrap=sleep 2")
    tracked.wait_until_finished(timeout_s=300)
    assert {event.cause for event in tracked.events("requeue")} == {cause}
    (again,) = re.findall(r"begins at (\d+)", logs[1].read_text())
    assert int(again) >= 20


@pytest.mark.parametrize("alone", [True, False])
def test_torchrun_in_a_script_that_two_hosts_run_is_one_world_or_fails(
    sandbox: Sandbox, tmp_path: Path, *, alone: bool
) -> None:
    (tmp_path / "train.py").write_text(
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "print('world of', dist.get_world_size(), flush=True)\n"
    )
    known = "--rdzv-endpoint=localhost:29500" if alone else "--nnodes=2 --rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT"
    (tmp_path / "run.sh").write_text(
        f"{sys.executable} -m torch.distributed.run --nproc-per-node=1 --rdzv-backend=c10d {known} train.py"
    )
    tracked = start(sandbox, tmp_path, "--nodes", "2", "--time", "10", "--", "bash", "run.sh")
    if not alone:
        tracked.wait_until_finished()
        assert tracked.log().count("world of 2") == 2
        return
    fields = tracked.wait_for_end("FAILED")
    assert (fields["ExitCode"], tracked.result["status"]) == ("70:0", "failed")
    assert "bash run.sh has started torch.distributed.run in several tasks" in tracked.result["reason"]


BIN = Path(sys.executable).parent
ON_TWO_HOSTS = ("--nodes", "2", "--time", "10")


@pytest.mark.long("the test below has one world of such ranks, and the one above a process group of torchrun's")
@pytest.mark.parametrize(
    "words",
    [
        ("--global-batch-size", "64", "--", BIN / "torchrun", "--nproc-per-node", "2", EXAMPLES / "torchrun_script.py"),
        ("--tasks-per-node", "2", "--", BIN / "accelerate", "launch", EXAMPLES / "accelerate_script.py"),
    ],
    ids=["torchrun", "accelerate"],
)
def test_a_launcher_as_the_command_is_started_once_on_each_host_and_all_ranks_are_one_world(
    sandbox: Sandbox, tmp_path: Path, words: tuple[str | Path, ...]
) -> None:
    tracked = start(sandbox, tmp_path, *ON_TWO_HOSTS, *words)
    tracked.wait_until_finished(timeout_s=240)
    said = re.findall(r"(rank \d of \d+):.* accuracy ([\d.]+)", tracked.log())
    assert {who for who, _ in said} == RANKS
    assert min(float(accuracy) for accuracy in dict(said).values()) > 0.85
    assert (tracked.result["status"], tracked.result["world_size"]) == ("finished", 4)
    assert sorted(tracked.attempt.rank_logs()) == [0, 1]


def test_ranks_of_a_launcher_save_at_a_preemption_and_go_on_in_the_next_attempt(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    begins = "rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} begins at"
    program = script(tmp_path, SAVES.replace("CODE", "0").replace("begins at", begins))
    on = ("--nodes", "2", "--nodelist", "n1,n2", "--partition", "low", "--time", "10")
    tracked = start(sandbox, tmp_path, *on, "--", BIN / "torchrun", "--nproc-per-node", "2", program)

    def ranks() -> list[str]:
        logs = (log for log in tracked.attempt.rank_logs().values() if tracked.attempts)
        return sorted(rank for log in logs for rank in re.findall("(.*) begins at 0", log.read_text()))

    tracked.wait_until(lambda: tracked.attempts and ranks() == sorted(RANKS), "one world of all ranks")
    high = ("--partition=high", "--exclusive", "--nodelist=n1,n2", "--nodes=2", "--output=/dev/null")
    sandbox.submit(*high, "--wrap=sleep 2")
    tracked.wait_until_finished(timeout_s=240)
    assert [event.cause for event in tracked.events("requeue")] == ["preemption"]
    again = re.findall(r"begins at (\d+)", (tracked.run.attempts / "1" / "rank-0.log").read_text())
    assert len(again) == 2
    assert min(map(int, again)) > 0


def test_why_names_the_exception_of_the_rank_that_failed_in_a_launcher(sandbox: Sandbox, tmp_path: Path) -> None:
    program = script(tmp_path, RAISES.format(rank=3))
    tracked = start(sandbox, tmp_path, *ON_TWO_HOSTS, "--", BIN / "torchrun", "--nproc-per-node=2", program)
    fields = tracked.wait_for_end("FAILED", timeout_s=240)
    assert (fields["ExitCode"], fields["Restarts"]) == ("70:0", "0")
    assert re.search(r"rank 3 on n\d failed first: ValueError: my own mistake", tracked.result["reason"])
    said = sandbox.run(*HPCDDP, "why", tracked.run.path, cwd=tmp_path).stdout
    assert "ValueError: my own mistake" in said
    assert "ChildFailedError" not in said
