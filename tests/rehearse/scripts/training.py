"""A right training of the user's own, which the scripts beside it spoil in one point each.

It stops at SIGTERM or SIGUSR2 after the same step on all ranks, saves everything that the next step depends on, and
goes on within the epoch. Run it by hpcddp: every rank has RANK, WORLD_SIZE and MASTER_ADDR.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DistributedSampler

import hpcddp

SAMPLES, BATCH, EPOCHS = 80, 8, 4
SAVE_EVERY = 4
PAUSE_S = 0.2


class Training:
    """The model, what trains it, and its loop."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        torch.manual_seed(0)
        self.inputs = torch.randn(SAMPLES, 6)
        self.targets = (self.inputs.sum(1) > 0).long()
        self.network = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
        self.model = DistributedDataParallel(self.network)
        self.averaged = AveragedModel(self.network, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = StepLR(self.optimizer, step_size=6, gamma=0.7)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=10)
        self.sampler: DistributedSampler[Any] = DistributedSampler(range(SAMPLES), seed=3)  # type: ignore[arg-type]
        self.step = 0
        self.is_told_to_stop = False
        torch.manual_seed(100 + self.rank)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch."""
        return SAMPLES // dist.get_world_size() // BATCH

    @property
    def directory(self) -> Path:
        """Where the run saves."""
        return Path(os.environ["HPCDDP_RUN_DIR"])

    def state(self) -> dict[str, Any]:
        """Return everything that the next step depends on."""
        generators = [torch.empty(0, dtype=torch.uint8)] * dist.get_world_size()
        dist.all_gather_object(generators, torch.get_rng_state())
        return {
            "model": self.network.state_dict(),
            "averaged": self.averaged.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "generators": generators,
            "step": self.step,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.network.load_state_dict(state["model"])
        self.averaged.load_state_dict(state["averaged"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.scaler.load_state_dict(state["scaler"])
        if len(state["generators"]) == dist.get_world_size():
            torch.set_rng_state(state["generators"][self.rank])
        self.step = state["step"]

    def save(self) -> None:
        """Write the state of this step into a file of its own; its name appears when it is complete."""
        state = self.state()
        if self.rank == 0:
            self.write(state, self.directory / f"step-{self.step:04d}.pt")
        dist.barrier()

    def save_if_due(self) -> None:
        """Save every few steps."""
        if self.step % SAVE_EVERY == 0:
            self.save()

    def write(self, state: dict[str, Any], path: Path) -> None:
        """Write a state."""
        temporary = path.with_name(f".{path.name}")
        torch.save(state, temporary)
        temporary.rename(path)

    def resume(self) -> None:
        """Load the newest state that can be loaded."""
        for path in sorted(self.directory.glob("step-*.pt"), reverse=True):
            with suppress(Exception):
                self.load(torch.load(path, weights_only=True))
                return

    def indices(self, epoch: int) -> list[int]:
        """Return this rank's samples of an epoch, in their order."""
        self.sampler.set_epoch(epoch)
        return list(self.sampler)

    def first_step_of(self, epoch: int) -> int:
        """Return the first step of an epoch that is left to do, counted within it."""
        return self.step - epoch * self.steps_per_epoch

    def epochs(self) -> range:
        """Return the epochs that are left to do."""
        return range(self.step // self.steps_per_epoch, EPOCHS)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches that are left to do."""
        for epoch in self.epochs():
            indices = self.indices(epoch)
            for step in range(self.first_step_of(epoch), self.steps_per_epoch):
                chosen = indices[step * BATCH : (step + 1) * BATCH]
                yield self.inputs[chosen], self.targets[chosen]

    def update(self, inputs: Tensor, targets: Tensor) -> float:
        """Make one optimizer step and return the loss over all ranks."""
        loss = functional.cross_entropy(self.model(inputs), targets)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.averaged.update_parameters(self.network)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean.item() / dist.get_world_size()

    def tell_to_stop(self, *_: object) -> None:
        """Remember a signal until the end of the step."""
        self.is_told_to_stop = True

    def listen(self) -> None:
        """Handle the signals that ask the program to save."""
        for signum in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(signum, self.tell_to_stop)

    def must_stop(self) -> bool:
        """Return whether any rank was told to stop, on all ranks the same."""
        votes = torch.tensor(int(self.is_told_to_stop))
        dist.all_reduce(votes)
        return bool(votes)

    def stop(self) -> None:
        """Save and leave."""
        self.save()
        sys.exit(75)

    def evaluate(self) -> float:
        """Return the loss of all samples, with the averages of BatchNorm."""
        self.network.eval()
        with torch.no_grad():
            loss = functional.cross_entropy(self.network(self.inputs), self.targets)
        self.network.train()
        return loss.item()

    def run(self) -> None:
        """Train from the newest state to the end."""
        self.listen()
        self.resume()
        for inputs, targets in self.batches():
            rate, scale = self.scheduler.get_last_lr()[0], self.scaler.get_scale()
            loss = self.update(inputs, targets)
            self.step += 1
            hpcddp.log({"loss": loss, "lr": rate, "loss_scale": scale}, step=self.step)
            time.sleep(PAUSE_S)
            if self.must_stop():
                self.stop()
            self.save_if_due()
        hpcddp.log({"val_loss": self.evaluate()}, step=self.step)
        if self.rank == 0:
            self.write({"model": self.network.state_dict(), "averaged": self.averaged.state_dict()}, self.final)

    @property
    def final(self) -> Path:
        """The result of the training."""
        return self.directory / "final.pt"


def main(kind: type[Training]) -> None:
    """Train on all ranks."""
    dist.init_process_group("gloo")
    kind().run()
    # DDP is part of reference cycles. If it is freed after its process group, it can abort the process.
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Training)
