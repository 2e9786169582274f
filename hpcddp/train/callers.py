"""Rank and collectives for ``Stopper`` and ``Checkpointer``, which also work in one process without a process group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
import torch.distributed as dist

from hpcddp.errors import UserError

# Set by torchrun and by srun. The variables of sbatch do not count: the batch script itself has them.
_COUNTS = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


class NoGroupError(UserError):
    """Several processes have been started, and no process group is open."""

    kind: ClassVar[str] = "no_group"


def rank() -> int:
    """Return this process's rank; 0 where no process group is open."""
    return dist.get_rank() if dist.is_initialized() else 0


def broadcast_numbers(numbers: Sequence[int]) -> list[int]:
    """Return rank 0's numbers on every rank; every rank passes equally many."""
    if not dist.is_initialized():
        return list(numbers)
    tensor = torch.tensor(list(numbers), dtype=torch.int64, device=collective_device())
    dist.broadcast(tensor, src=0)
    return [int(number) for number in tensor.tolist()]


def collective_device() -> torch.device:
    """Return the device of tensors for collectives of the default process group."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def refuse_without_group(environment: Mapping[str, str]) -> None:
    """Refuse to work without a process group if several processes have been started.

    Raises:
        NoGroupError: several processes have been started, and no process group is open.
    """
    if dist.is_initialized():
        return
    for name in _COUNTS:
        count = environment.get(name, "")
        if count.isdecimal() and int(count) > 1:
            raise NoGroupError(
                f"{name} is {count}, so that {count} processes have been started, but no process group is open and "
                "each would take itself for the only one; call torch.distributed.init_process_group first"
            )
