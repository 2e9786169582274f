"""Measure the built-in training step beside loops that people write by hand.

    python -m benchmarks.step [--rounds 3] [--output FILE]

Contenders, with the same data set of the user's own (map-style, in memory), model, optimizer and global batch of 32:

    hpcddp      the built-in training
    ddp         DistributedDataParallel, DistributedSampler, DataLoader, one JSON line with the loss per step
    plain       the same without DDP; one rank only
    accelerate  Accelerator.prepare, the same log
    lightning   Trainer with manual logging of the loss to the same log; one rank only

They run in turn, each in processes of its own. The time of a step is that between two lines of the log, of the steps
after the first fifth.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from benchmarks.turns import Case, in_turn, main
from hpcddp.jobfile.job import JobSpec
from hpcddp.run.directory import RunDirectory

BATCH: Final = 32
STEPS: Final = {"mlp": 1500, "wide": 500, "resnet18": 20}
SHAPES: Final = {"mlp": (64,), "wide": (64,), "resnet18": (3, 32, 32)}
WAYS: Final = ("hpcddp", "ddp", "plain", "accelerate", "lightning")
ONE_RANK: Final = ("plain", "lightning")
CLASSES: Final = 10


class Samples(Dataset[tuple[Tensor, int]]):
    """A map-style data set as people write one: a tensor in memory, one sample at a time."""

    def __init__(self, shape: tuple[int, ...], samples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        kinds = torch.randn(CLASSES, *shape, generator=generator)
        self.targets = torch.arange(samples) % CLASSES
        self.inputs = kinds[self.targets] + torch.randn(samples, *shape, generator=generator)
        self.labels = self.targets.tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.inputs[index], self.labels[index]


def samples(split: str, model: str) -> Samples:
    """Return the data set, as ``train.dataset`` takes it."""
    return Samples(SHAPES[model], int(os.environ["STEPS"]) * BATCH if split == "train" else BATCH)


def build(num_classes: int, *, name: str) -> nn.Module:
    """Return the model, as ``train.model`` takes it."""
    if name == "mlp":
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, num_classes))
    if name == "wide":
        # About 12 ms in a step of two ranks on two CPUs.
        layers = (nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, num_classes))
        return nn.Sequential(*layers)
    from torchvision.models import resnet18

    model: nn.Module = resnet18(num_classes=num_classes)
    model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    return model


class Log:
    """One JSON line with the loss per step, as people log it."""

    def __init__(self, path: Path) -> None:
        self._stream = path.open("w")

    def add(self, step: int, loss: float) -> None:
        """Write the line of a step."""
        self._stream.write(json.dumps({"step": step, "loss": loss, "time": time.time()}) + "\n")

    def close(self) -> None:
        """Write what is buffered."""
        self._stream.close()


def by_hand(model_name: str, log: Path, *, parallel: bool) -> None:
    """Train for one epoch in a loop as PyTorch's tutorials have it."""
    torch.manual_seed(0)
    model = build(CLASSES, name=model_name)
    data = samples("train", model_name)
    world = dist.get_world_size()
    if parallel:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    loader = DataLoader(data, batch_size=BATCH // world, sampler=DistributedSampler(data), drop_last=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    lines = Log(log)
    for step, (inputs, labels) in enumerate(loader):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), labels)
        torch.autograd.backward(loss)
        optimizer.step()
        lines.add(step, loss.item())
    lines.close()


def with_accelerate(model_name: str, log: Path) -> None:
    """Train for one epoch with accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    data = samples("train", model_name)
    model = build(CLASSES, name=model_name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = DataLoader(data, batch_size=BATCH // accelerator.num_processes, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    lines = Log(log)
    for step, (inputs, labels) in enumerate(loader):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        optimizer.step()
        lines.add(step, loss.item())
    lines.close()


def with_lightning(model_name: str, log: Path) -> None:
    """Train for one epoch with Lightning."""
    import lightning

    lines = Log(log)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = build(CLASSES, name=model_name)

        def training_step(self, batch: list[Tensor], step: int) -> Tensor:
            loss = functional.cross_entropy(self.model(batch[0]), batch[1])
            lines.add(step, loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    loader = DataLoader(samples("train", model_name), batch_size=BATCH, shuffle=True, drop_last=True)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=log.parent,
    )  # fmt: skip
    trainer.fit(Module(), loader)
    lines.close()


def train_here(document: dict[str, Any], run: RunDirectory, device: torch.device) -> None:
    """Run the built-in training of a job file in this process, in the process group that is open."""
    from hpcddp.slurm.rank_env import RankEnv
    from hpcddp.train.context import TrainContext
    from hpcddp.train.loop.job import run_training

    rank, world = dist.get_rank(), dist.get_world_size()
    run.attempt(0).path.mkdir(parents=True, exist_ok=True)
    env = RankEnv(
        rank=rank, local_rank=rank, world_size=world, local_world_size=world, node_rank=0, nodes=1, source="torchrun",
    )  # fmt: skip
    run_training(
        TrainContext(
            spec=JobSpec.model_validate(document),
            rank_env=env,
            device=device,
            run=run,
            attempt=0,
            threads=torch.get_num_threads(),
            write_line=lambda _: None,
        )
    )


def with_hpcddp(model_name: str, log: Path, *, max_failures: int = 0) -> None:
    """Train for one epoch with the built-in training."""
    document = {
        "name": "step",
        "resources": {"nodes": 1, "tasks_per_node": dist.get_world_size()},
        "batch": {"global_batch_size": BATCH},
        "learning_rate": {"base": 0.01},
        "requeue": {"max_failures": max_failures},
        "trackers": {"use": []},
        "train": {
            "model": "benchmarks.step:build", "model_args": {"name": model_name},
            "dataset": "benchmarks.step:samples", "dataset_args": {"model": model_name}, "num_workers": 0,
            "epochs": 1, "num_classes": CLASSES, "optimizer": {"name": "sgd", "momentum": 0.9},
        },
    }  # fmt: skip
    run = RunDirectory(log.parent)
    train_here(document, run, torch.device("cpu"))
    if dist.get_rank() == 0:
        run.metrics.rename(log)


def rank_main(way: str, model_name: str, log: Path) -> None:
    """Run one rank of a contender."""
    torch.set_num_threads(1)
    if way == "lightning":
        return with_lightning(model_name, log)
    dist.init_process_group("gloo")
    functions: dict[str, Callable[[str, Path], None]] = {
        "hpcddp": with_hpcddp,
        "accelerate": with_accelerate,
    }
    if way in functions:
        functions[way](model_name, log)
    else:
        by_hand(model_name, log, parallel=way == "ddp")
    dist.barrier()
    os._exit(0)


def run_ranks(way: str, model: str, ranks: int, directory: Path, *, steps: int) -> Path:
    """Run a contender in processes of its own, and return the log of rank 0."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    log = directory / "log-0.jsonl"
    processes = []
    for rank in range(ranks):
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        environment = {
            **os.environ, **{name: str(value) for name, value in numbers.items()}, "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "STEPS": str(steps),
        }  # fmt: skip
        path = log if way == "hpcddp" else log.with_name(f"log-{rank}.jsonl")
        words = [sys.executable, "-m", "benchmarks.step", "--rank", way, "--model", model, "--output", str(path)]
        processes.append(subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    codes = [process.wait() for process in processes]
    if any(codes):
        sys.exit(f"{way} with {ranks} ranks ended with {codes}")
    return log


def step_us(way: str, model: str, ranks: int) -> float:
    """Run a contender, and return the time of a step in microseconds."""
    with tempfile.TemporaryDirectory() as directory:
        lines = run_ranks(way, model, ranks, Path(directory), steps=STEPS[model]).read_text().splitlines()
    times: list[float] = [record["time"] for record in map(json.loads, lines) if "loss" in record]
    first = len(times) // 5
    return (times[-1] - times[first]) / (len(times) - 1 - first) * 1e6


def cases(rounds: int) -> Iterator[Case]:
    """Yield the comparisons."""
    for model in STEPS:
        for ranks in (1, 2):
            ways = [way for way in WAYS if ranks == 1 or way not in ONE_RANK]
            yield in_turn(
                f"step of {model}, {ranks} rank{'s' if ranks > 1 else ''}",
                {way: partial(step_us, way, model, ranks) for way in ways},
                base="ddp",
                unit="us",
                rounds=rounds,
            )


if __name__ == "__main__":
    if "--rank" in sys.argv:
        parser = argparse.ArgumentParser()
        parser.add_argument("--rank")
        parser.add_argument("--model")
        parser.add_argument("--output", type=Path)
        options = parser.parse_args()
        rank_main(options.rank, options.model, options.output)
    else:
        main("benchmarks.step", __doc__, cases, rounds=3)
