"""Your own training loop, without lost steps: ``hpcddp.Stopper`` says when to stop, ``hpcddp.Checkpointer`` saves.

Send SIGTERM or SIGUSR2 to any of its processes, or press Ctrl-C: all of them stop after the same step, save a
checkpoint, and end with exit code 75. Start it again with any number of processes: it continues at the next step.

    python examples/own_loop.py runs/own-loop
    torchrun --standalone --nproc-per-node 2 examples/own_loop.py runs/own-loop

docs/own-loop.md has a complete sbatch script that requeues itself.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn import datasets
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from hpcddp import Checkpointer, Stopper
from hpcddp.batch.sampler import GlobalBatches

GLOBAL_BATCH = 64
SEED = 0


def load_digits() -> tuple[Tensor, Tensor]:
    """Return handwritten digits ``[1797, 64]`` and their labels ``[1797]``."""
    digits = datasets.load_digits()
    return torch.from_numpy(digits.data) / 16, torch.from_numpy(digits.target)


def make_model() -> nn.Module:
    """Return the model, the same on each process; wrapped in DDP if there are several."""
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).double()
    return DistributedDataParallel(model) if dist.is_initialized() else model


def train(directory: Path, *, steps: int, save_every: int, pause_s: float = 0.0) -> float:
    """Train from the newest checkpoint to ``steps`` optimizer steps, and return the last loss on this rank."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    images, labels = load_digits()
    model = make_model()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # The samples of a step follow from its number: the position in the data need not be saved.
    batches = GlobalBatches(len(images), GLOBAL_BATCH, tail="drop", order="keyed", seed=SEED)

    stopper = Stopper()
    checkpointer = Checkpointer(
        directory,
        {"model": model, "optimizer": optimizer},
        contract={"seed": SEED, "global batch": GLOBAL_BATCH},
    )
    first = checkpointer.restore().step
    loss = torch.tensor(0.0)
    for step in range(first, steps):
        indices = torch.from_numpy(batches.indices(*divmod(step, batches.steps_per_epoch)))
        share = indices[rank::ranks]
        optimizer.zero_grad()
        # DDP averages over ranks. With equal shares that is the average over samples.
        loss = functional.cross_entropy(model(images[share]), labels[share])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        time.sleep(pause_s)
        if rank == 0:
            print(f"step {step + 1}  loss {loss.item():.6f}", flush=True)

        # Called once after every step, on every rank.
        if stopper.should_stop() and step + 1 < steps:
            checkpointer.save(step + 1)
            checkpointer.wait()
            stopper.exit()
        if (step + 1) % save_every == 0 or step + 1 == steps:
            checkpointer.save(step + 1)
    checkpointer.wait()
    return loss.item()


def main() -> None:
    """Open a group if torchrun started this process, and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="the run's own directory, on a file system that every rank sees")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps in all")
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--pause", type=float, default=0.0, metavar="SECONDS", help="makes each step longer")
    options = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    train(options.directory, steps=options.steps, save_every=options.save_every, pause_s=options.pause)
    if dist.is_initialized():
        # DDP is part of reference cycles. If it is freed after its process group, it can abort the process.
        gc.collect()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
