"""Do all ranks see the same data? Each opens it by itself, on its own host."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hpcddp.train.data.images import Data
from hpcddp.train.errors import DataError

_DIGITS = 15  # of the fingerprint; sixty bits fit into an int64


def refuse_other_data(data: Data, *, rank: int, world_size: int, device: torch.device) -> None:
    """Refuse a training whose ranks have opened different data; a collective.

    With other sizes the ranks would make other numbers of steps and meet in the wrong collective; with other samples a
    global batch would be nobody's.

    Args:
        data: what this rank has opened.
        rank: this rank.
        world_size: ranks.
        device: where collectives take place.

    Raises:
        DataError: some rank sees other data than rank 0; on all ranks, with the same sentence.
    """
    rows = torch.zeros(world_size, 3, dtype=torch.int64)
    rows[rank] = torch.tensor([len(data.train), len(data.val), int(data.fingerprint[:_DIGITS] or "0", 16)])
    seen = rows.to(device)
    # Every row is written by one rank alone, so that the sum gathers them.
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
