"""Measure how long the submission of a thousand runs takes: a sweep, and submitit's ``map_array``, in turn.

    python -m benchmarks.sweep [--rounds 7] [--output FILE]

starts a separate Slurm whose jobs are held, so that nothing runs; it needs Slurm's daemons. Peers: ``map_array`` of a
training that is defined in the submitting script, as in submitit's own examples (cloudpickle writes its code into each
pickle), and of an importable function that does nothing, the cheapest case. The lower limit is one call of ``sbatch``
for an array of the same length.
"""

from __future__ import annotations

import json
import operator
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from submitit import SlurmExecutor
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.turns import Case, in_turn, main
from hpcddp.jobfile.overrides import sweep_overrides
from hpcddp.jobfile.read import load_job
from hpcddp.slurm import commands
from hpcddp.submission.request import SubmitRequest
from hpcddp.submission.sweep import submit_sweep

COUNT = 1000
JOB = """\
name: digits
resources: {time_limit: 20, sbatch: {hold: true}}
batch: {global_batch_size: 64}
learning_rate: {base: 0.1}
train: {model: resnet18, dataset: digits, epochs: 2}
"""
# A job stays in Slurm's memory for a while after its end, and a thousand are added each time.
SETTINGS = ("MaxJobCount=200000", "MinJobAge=2")


def accuracy(model: nn.Module, loader: DataLoader[Any]) -> float:
    """Return the accuracy of a model; a part of the peer's training."""
    model.eval()
    right = total = 0
    with torch.no_grad():
        for images, labels in loader:
            right += int((model(images).argmax(1) == labels).sum())
            total += len(labels)
    return right / total


def train(learning_rate: float, seed: int) -> float:
    """Train on the digits, as one writes it for ``map_array``."""
    from sklearn.datasets import load_digits

    torch.manual_seed(seed)
    digits = load_digits()
    images, labels = torch.tensor(digits.images)[:, None], torch.tensor(digits.target)
    data, held = TensorDataset(images[:1437], labels[:1437]), TensorDataset(images[1437:], labels[1437:])
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    for _ in range(2):
        for batch, target in DataLoader(data, batch_size=64, shuffle=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch), target).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return accuracy(model, DataLoader(held, batch_size=64))


@contextmanager
def slurm() -> Iterator[Path]:
    """Start a Slurm, and end it afterwards."""
    parent = Path(tempfile.mkdtemp(prefix="hpcddp-"))
    words = (sys.executable, "-P", "-m", "hpcddp", "sandbox")
    options = [word for setting in SETTINGS for word in ("--conf", setting)]
    try:
        up = (*words, "up", "--dir", str(parent / "s"), "--nodes", "2", "--json", *options)
        started = subprocess.run(up, capture_output=True, check=True, text=True)
        yield Path(json.loads(started.stdout)["slurm_conf"])
    finally:
        subprocess.run((*words, "down", "--dir", str(parent / "s")), capture_output=True, check=False)
        shutil.rmtree(parent, ignore_errors=True)


def ours(directory: Path) -> str:
    """Submit a sweep as ``hpcddp submit`` does, and return its job id."""
    (directory / "job.yaml").write_text(JOB)
    options = sweep_overrides([f"train.seed=0..{COUNT - 1}"], None, None)
    job = load_job(directory / "job.yaml", options=options)
    request = SubmitRequest(
        job=job,
        run_id="s1",
        cluster="slurm",
        python=sys.executable,
        template=None,
        directory=directory,
        environment=dict(os.environ),
    )
    return submit_sweep(request).sweep.chunks[0].job_id


def map_array(function: Callable[..., Any]) -> Callable[[Path], str]:
    """Return the peer: submitit's ``map_array`` of a function of a learning rate and a seed."""

    def submit(directory: Path) -> str:
        executor = SlurmExecutor(directory / "runs")
        executor.update_parameters(time=20, additional_parameters={"hold": True})
        jobs = executor.map_array(function, [0.1] * COUNT, range(COUNT))
        return str(jobs[0].job_id).partition("_")[0]

    return submit


def floor(directory: Path) -> str:
    """Submit an array of the same length with sbatch alone."""
    script = directory / "job.sh"
    script.write_text(f"#!/bin/bash\n#SBATCH --hold\n#SBATCH --array=0-{COUNT - 1}\nsleep 1\n")
    return commands.sbatch(script, environment=os.environ)


def milliseconds(submit: Callable[[Path], str]) -> float:
    """Return how long a submission takes, in a new directory."""
    directory = Path(tempfile.mkdtemp(prefix="hpcddp-"))
    os.chdir(directory)
    try:
        began = time.perf_counter()
        job_id = submit(directory)
        took = time.perf_counter() - began
        commands.cancel([job_id], environment=os.environ)
        return took * 1e3
    finally:
        os.chdir("/")
        shutil.rmtree(directory)


def cases(rounds: int) -> Iterator[Case]:
    """Yield the comparison, if Slurm is installed."""
    if shutil.which("slurmctld") is None:
        return
    ways = {
        "hpcddp": ours, "map_array": map_array(train), "map_array of no work": map_array(operator.add), "sbatch": floor,
    }  # fmt: skip
    directory, before = Path.cwd(), os.environ.get("SLURM_CONF")
    with slurm() as conf:
        os.environ["SLURM_CONF"] = str(conf)
        yield in_turn(
            f"submission of {COUNT} runs",
            {way: partial(milliseconds, submit) for way, submit in ways.items()},
            base="map_array",
            unit="ms",
            rounds=rounds,
        )
    os.chdir(directory)
    os.environ.pop("SLURM_CONF")
    if before is not None:
        os.environ["SLURM_CONF"] = before


if __name__ == "__main__":
    main("benchmarks.sweep", __doc__, cases, rounds=7)
