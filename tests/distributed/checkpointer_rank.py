"""One rank of a loop of one's own: ``checkpointer_rank.py RUN FAULTS``; rank and group as torchrun gives them."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from hpcddp import Checkpointer
from hpcddp.stop import faults
from hpcddp.train.checkpoint.checkpointer import SaveSettings


def main(run: Path, text: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Linear(2, 2)
    # Minutes pass between two saves, so that the third failure ends the loop.
    clock = itertools.count(0.0, 150.0)
    settings = SaveSettings(monotonic=lambda: next(clock))
    checkpointer = Checkpointer(run, {"model": model}, settings=settings)
    first = checkpointer.restore().step
    print(f"begins after step {first} with {model.weight.flatten().tolist()}", flush=True)
    faults.arm(text, rank=rank, attempt=0)
    try:
        for step in range(first + 1, first + 5):
            checkpointer.save(step, {"step": step})
            print(f"saved {checkpointer.wait()}", flush=True)
    except Exception as error:  # noqa: BLE001  every rank says what it got
        print(f"{type(error).__name__}: {error}", flush=True)
    # After the same error every rank stands at the same place.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
    sys.stdout.flush()
    os._exit(0)
