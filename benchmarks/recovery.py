"""Measure how long a training pauses when a rank is killed.

    python -m benchmarks.recovery [--rounds 3] [--output FILE]

As root: the host is a network namespace. SIGKILL ends rank 1 of two on one host of a real Slurm, and the time until the
first step after it is measured. The same script runs under hpcddp, which starts it again in its job (``restart``) or
requeues the job (``requeue``), and under ``torchrun --max-restarts`` in a job of sbatch. The built-in training,
Lightning and a function are compared between restart and requeue.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, Final

from benchmarks.turns import Case, in_turn, main
from hpcddp import polling
from tests.cluster.commands import start
from tests.cluster.sandbox import Sandbox
from tests.cluster.sandboxes import sandbox_with
from tests.waiting import wait_until

# Each program appends a line for each step of a rank: when its process began, and the time. On request it is killed
# there: from outside, its process id is another one.
_RECORD: Final = """
import os, signal, time
BEGAN = time.time()
def record(rank):
    with open(f"steps-{rank}", "a") as steps:
        steps.write(f"{BEGAN} {time.time()}\\n")
    if os.path.exists(f"kill-{rank}"):
        os.remove(f"kill-{rank}")
        os.kill(os.getpid(), signal.SIGKILL)
"""
_SCRIPT: Final = """
import os, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from record import record

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
first = 0
if os.path.exists("checkpoint.pt"):
    state = torch.load("checkpoint.pt", weights_only=True)
    model.load_state_dict(state["model"])
    first = state["step"]
for step in range(first, 2000):
    optimizer.zero_grad()
    model(torch.ones(8, 64)).square().mean().backward()
    optimizer.step()
    record(dist.get_rank())
    time.sleep(0.05)
    if dist.get_rank() == 0 and step % 10 == 9:
        torch.save({"model": model.state_dict(), "step": step + 1}, "checkpoint.new")
        os.replace("checkpoint.new", "checkpoint.pt")
"""
_LIGHTNING: Final = """
import time
import lightning, torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from record import record

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 1)
    def training_step(self, batch, _):
        record(self.global_rank)
        time.sleep(0.05)
        return self.layer(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

saves = ModelCheckpoint(dirpath="saves", every_n_train_steps=10, save_last=True)
trainer = lightning.Trainer(
    max_steps=2000, accelerator="cpu", devices=2, callbacks=[saves], logger=False, enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Model(), DataLoader(TensorDataset(torch.ones(4000, 64)), batch_size=4), ckpt_path="last")
"""
_FUNCTION: Final = """
import time
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from record import record

def main(context):
    model = DistributedDataParallel(nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = context.checkpointer({"model": model, "optimizer": optimizer})
    for step in range(checkpointer.restore().step, 2000):
        optimizer.zero_grad()
        model(torch.ones(8, 64)).square().mean().backward()
        optimizer.step()
        record(context.rank)
        time.sleep(0.05)
        if step % 10 == 9:
            checkpointer.save(step + 1)
"""
_MODEL: Final = """
import os, time
from torch import nn
from record import record

class Model(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(3072, classes))
    def forward(self, images):
        # hpcddp tries a model with two samples before it trains.
        if self.training and len(images) > 2:
            record(os.environ["RANK"])
            time.sleep(0.05)
        return self.layers(images)

def build(num_classes):
    return Model(num_classes)
"""
_JOBS: Final[dict[str, dict[str, Any]]] = {
    "train": {
        "batch": {"global_batch_size": 16},
        "train": {"model": "model:build", "dataset": "digits", "epochs": 50},
        "checkpoint": {"every": {"steps": 10}},
        "trackers": {"use": []},
    },
    "function": {"entrypoint": "function:main"},
    "script": {"command": [sys.executable, "script.py"]},
    "lightning": {"command": [sys.executable, "lightning_script.py"]},
}
_TORCHRUN: Final = (
    shutil.which("torchrun") or "torchrun", "--standalone", "--nproc-per-node=2", "--max-restarts=3", "script.py",
)  # fmt: skip
_STEPS_BEFORE: Final = 25
LONGEST_S: Final = 60.0
"""A job without a step in this time counts as if it had made one then."""


def place(directory: Path, name: str) -> Path:
    """Return a new directory with all programs."""
    path = directory / name
    path.mkdir()
    programs = {
        "record.py": _RECORD, "script.py": _SCRIPT, "lightning_script.py": _LIGHTNING, "function.py": _FUNCTION,
        "model.py": _MODEL,
    }  # fmt: skip
    for file, text in programs.items():
        (path / file).write_text(text)
    return path


def steps_of(directory: Path, rank: int) -> list[tuple[float, float]]:
    """Return when the process of each step of a rank began, and the time of the step."""
    path = directory / f"steps-{rank}"
    if not path.exists():
        return []
    lines = [line.split() for line in path.read_text().splitlines()]
    return [(float(began), float(time)) for began, time in lines]


def pause_s(sandbox: Sandbox, directory: Path, job_id: str) -> float:
    """Kill rank 1, and return the time until the first step of the process in its place, in seconds."""
    wait_until(lambda: len(steps_of(directory, 1)) >= _STEPS_BEFORE, lambda: f"steps in {directory}", 120)
    killed, _ = steps_of(directory, 1)[-1]
    (directory / "kill-1").touch()

    def next_steps() -> list[float]:
        return [time for began, time in steps_of(directory, 1) if began != killed]

    polling.wait_until(next_steps, timeout_s=LONGEST_S, poll_s=0.1)
    killed_at = max(time for began, time in steps_of(directory, 1) if began == killed)
    sandbox.run("scancel", job_id)
    sandbox.wait(job_id, {"CANCELLED", "COMPLETED", "FAILED", "PREEMPTED"})
    return min(next_steps(), default=killed_at + LONGEST_S) - killed_at


def measure_hpcddp(sandbox: Sandbox, directory: Path, what: str, recovery: str) -> float:
    """Return the pause of a job of hpcddp, in seconds."""
    job = directory / "job.yaml"
    resources = {"nodes": 1, "tasks_per_node": 2, "cpus_per_task": 1, "time_limit": 20}
    requeue = {"max_failures": 3, "recovery": recovery}
    job.write_text(json.dumps({"name": "job", "resources": resources, "requeue": requeue, **_JOBS[what]}))
    tracked = start(sandbox, directory, job)
    return pause_s(sandbox, directory, tracked.job_id)


def measure_torchrun(sandbox: Sandbox, directory: Path) -> float:
    """Return the pause of a job of sbatch whose torchrun starts its ranks again, in seconds."""
    job_id = sandbox.submit("--ntasks=1", "--cpus-per-task=2", f"--chdir={directory}", "--wrap", " ".join(_TORCHRUN))
    return pause_s(sandbox, directory, job_id)


def cases(rounds: int) -> Iterator[Case]:
    """Measure every program with every way to go on, in turn."""
    numbers = count()
    with sandbox_with() as sandbox, tempfile.TemporaryDirectory(prefix="hpcddp-recovery-") as text:
        directory = Path(text)

        def way(measure: Callable[..., float], *arguments: str) -> Callable[[], float]:
            return lambda: measure(sandbox, place(directory, str(next(numbers))), *arguments)

        for what in _JOBS:
            ways = {f"hpcddp, {recovery}": way(measure_hpcddp, what, recovery) for recovery in ("restart", "requeue")}
            if what == "script":
                ways["torchrun --max-restarts"] = way(measure_torchrun)
            yield in_turn(
                f"killed rank to next step, {what}",
                ways,
                base="hpcddp, restart",
                unit="s",
                rounds=rounds,
                warm_up=False,
            )


if __name__ == "__main__":
    main("benchmarks.recovery", __doc__ or "", cases, rounds=3)
