"""Check that all ranks have opened the same data."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hpcddp.train.data.images import Data
from hpcddp.train.errors import DataError

_DIGITS = 15  # hex digits of the fingerprint, 60 bits, which fit into an int64


def refuse_other_data(data: Data, *, rank: int, world_size: int, device: torch.device) -> None:
    """Refuse a training whose ranks have opened different data; a collective.

    With different sizes, the ranks would make different numbers of steps and mix up their collectives. With different
    samples, the global batch would not be defined.

    Args:
        data: the data set as this rank has opened it.
        rank: this rank.
        world_size: number of ranks.
        device: device of the collective.

    Raises:
        DataError: the data of some rank differs from rank 0's; raised on all ranks.
    """
    rows = torch.zeros(world_size, 3, dtype=torch.int64)
    rows[rank] = torch.tensor([len(data.train), len(data.val), int(data.fingerprint[:_DIGITS] or "0", 16)])
    seen = rows.to(device)
    # Each rank fills its own row only, so the sum gathers the rows.
    dist.all_reduce(seen)
    first, *others = seen.tolist()
    for other_rank, other in enumerate(others, start=1):
        if other != first:
            raise DataError(
                f"dataset {data.name} is another one on rank {other_rank} than on rank 0: {_describe(other)}, and "
                f"{_describe(first)}; let every host see the same files, and give what is drawn at random a fixed seed"
            )


def _describe(seen: list[int]) -> str:
    train, val, digest = seen
    return f"{train:,} training and {val:,} validation samples (fingerprint {digest:0{_DIGITS}x})"
