"""Who calls from a loop of one's own: a rank of the default process group, or the only process there is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
import torch.distributed as dist

from hpcddp.errors import UserError

# As torchrun and srun tell their processes; the variables of sbatch are not enough, a script has them too.
_COUNTS = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


class NoGroupError(UserError):
    """Several processes have been started, and they cannot talk to each other."""

    kind: ClassVar[str] = "no_group"


def rank() -> int:
    """Return this process's rank; 0 where no process group is open."""
    return dist.get_rank() if dist.is_initialized() else 0


def broadcast_numbers(numbers: Sequence[int]) -> list[int]:
    """Return rank 0's numbers on every rank.

    Args:
        numbers: as many on every rank.
    """
    if not dist.is_initialized():
        return list(numbers)
    told = torch.tensor(list(numbers), dtype=torch.int64, device=collective_device())
    dist.broadcast(told, src=0)
    return [int(number) for number in told.tolist()]


def collective_device() -> torch.device:
    """Return where a tensor must lie to travel in the default process group."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def refuse_without_group(environment: Mapping[str, str]) -> None:
    """Refuse that each of several processes takes itself for the only one.

    Args:
        environment: of this process.

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
