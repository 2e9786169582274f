"""Measure how long a save stops the training, beside other ways to copy or write the same state.

    python -m benchmarks.save [--rounds 15] [--output FILE]

The state is a model of 101 MB in float32 with SGD and momentum: 202 MB. ``memcpy`` copies as many bytes into memory
that was written before. All of them use one thread.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.checkpoint.state_dict_saver import async_save

from benchmarks.turns import Case, in_turn, main
from hpcddp import Checkpointer

_WIDTH: Final = 1024
_LAYERS: Final = 24


class Contenders:
    """The model and its optimizer, and the ways to save them."""

    def __init__(self, directory: Path) -> None:
        self.model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))
        self.optimizer = optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.checkpointer = Checkpointer(directory / "run", {"model": self.model, "optimizer": self.optimizer}, keep=2)
        self.checkpointer.restore()
        self.directory = directory
        self.saved = 0
        self.step()
        size = 2 * sum(parameter.numel() for parameter in self.model.parameters())
        self.source, self.target = torch.ones(size), torch.ones(size)

    def step(self) -> None:
        """Make a step that changes every parameter and its state."""
        self.optimizer.zero_grad()
        self.model(torch.ones(1, _WIDTH)).mean().backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """Return the state as one tree."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def hpcddp(self) -> float:
        """Return how long a save stops the training."""
        self.saved += 1
        took = self.timed(lambda: self.checkpointer.save(self.saved))
        self.checkpointer.wait()
        return took

    def memcpy(self) -> float:
        """Return how long a copy of as many bytes takes."""
        return self.timed(lambda: self.target.copy_(self.source))

    def torch_save(self) -> float:
        """Return how long ``torch.save`` takes, without checksum and fsync."""
        return self.timed(lambda: torch.save(self.state(), self.directory / "state.pt"))

    def async_save(self) -> float:
        """Return how long ``torch.distributed.checkpoint.async_save`` stops the training."""
        target = self.directory / "dcp"
        shutil.rmtree(target, ignore_errors=True)
        futures: list[Any] = []
        took = self.timed(lambda: futures.append(async_save(self.state(), checkpoint_id=target)))
        futures[0].result()
        return took

    def step_beside_a_write(self) -> float:
        """Return how long steps take while a checkpoint is written."""
        self.saved += 1
        self.checkpointer.save(self.saved)
        took = []
        while self.checkpointer.busy:
            took.append(seconds(self.step))
        self.checkpointer.wait()
        return sum(took) / len(took) * 1e3

    def step_alone(self) -> float:
        """Return how long a step takes."""
        return sum(seconds(self.step) for _ in range(10)) * 1e2

    def timed(self, save: Callable[[], object]) -> float:
        """Return how many milliseconds a save takes after a step."""
        self.step()
        return seconds(save) * 1e3


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes, in seconds."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def cases(rounds: int) -> Iterator[Case]:
    """Yield the comparisons."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        contenders = Contenders(Path(directory))
        # dcp.async_save needs a group with a CPU backend.
        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=0, world_size=1)
        yield in_turn(
            "save of 202 MB, until the training continues",
            {
                "hpcddp": contenders.hpcddp,
                "memcpy": contenders.memcpy,
                "torch.save": contenders.torch_save,
                "dcp.async_save": contenders.async_save,
            },
            base="memcpy",
            unit="ms",
            rounds=rounds,
        )
        yield in_turn(
            "step while a checkpoint is written",
            {"beside a write": contenders.step_beside_a_write, "alone": contenders.step_alone},
            base="alone",
            unit="ms",
            rounds=rounds,
        )
        dist.destroy_process_group()


if __name__ == "__main__":
    main("benchmarks.save", __doc__, cases, rounds=15)
