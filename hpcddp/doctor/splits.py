"""Ways to split a batch over ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from hpcddp.batch.split import divide

_RANDOM_SPLITS = 4
# One sample alone has no spread and no neighbour; few trainings give a rank that little.
_LEAST = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A batch in parts.

    Args:
        name: ``even``, ``uneven`` or ``permuted``.
        rows: the samples of each rank, int64.
    """

    name: str
    rows: tuple[Tensor, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples per rank."""
        return tuple(len(rows) for rows in self.rows)


def contract_split(samples: int, world_size: int) -> Split:
    """Return the shares of the batch contract: contiguous, differing by one sample at most."""
    sizes = divide(samples, world_size)
    return Split(name="even", rows=torch.split(torch.arange(samples), list(sizes)))


def random_splits(samples: int, world_size: int, seed: int) -> list[Split]:
    """Return uneven splits, in order and permuted, over 2 to ``world_size`` ranks.

    Args:
        samples: n.
        world_size: W <= n.
        seed: the splits are a function of it.
    """
    g = torch.Generator().manual_seed(seed)
    splits = []
    for number in range(_RANDOM_SPLITS):
        ranks = world_size if number < 2 else int(torch.randint(2, world_size + 1, (), generator=g))  # noqa: PLR2004
        sizes = _uneven(samples, ranks, g)
        permuted = number % 2 == 1
        rows = torch.randperm(samples, generator=g) if permuted else torch.arange(samples)
        splits.append(Split(name="permuted" if permuted else "uneven", rows=torch.split(rows, sizes)))
    return splits


def _uneven(samples: int, ranks: int, g: Generator) -> list[int]:
    """Return random sizes that add up to ``samples``, each at least 2 where there are enough samples."""
    least = min(_LEAST, samples // ranks)
    extra = samples - least * ranks
    owners = torch.randint(0, ranks, (extra,), generator=g)
    # The first rank takes half of what is left over, so that no draw comes out even.
    owners[: extra // 2] = 0
    return [least + int((owners == rank).sum()) for rank in range(ranks)]
