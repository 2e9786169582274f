"""Measure the time to the first index of an epoch of 100 million samples, beside torch's DistributedSampler.

    python -m benchmarks.sampler [--rounds 3] [--output FILE]

Rank 3 of 8, global batch of 1,024; at the start of an epoch, and at half of it, as for a run that resumes there.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from torch.utils.data import Dataset, DistributedSampler

from benchmarks.turns import Case, in_turn, main
from hpcddp.batch.plan import plan_batch
from hpcddp.batch.sampler import GlobalBatches, share_of

SAMPLES: Final = 100_000_000
BATCH: Final = 1024
RANKS: Final = 8
RANK: Final = 3


class Samples(Dataset[int]):
    """A data set that is not read."""

    def __len__(self) -> int:
        return SAMPLES


def with_hpcddp(step: int) -> None:
    """Compute the first index of this rank in a step."""
    plan = plan_batch(global_batch_size=BATCH, world_size=RANKS, samples=SAMPLES)
    batches = GlobalBatches(SAMPLES, BATCH, "keep", "keyed", 0)
    int(share_of(plan, batches.indices(0, step), RANK)[0][0])


def with_torch(step: int) -> None:
    """Compute the first index of this rank in a step, and all before it."""
    indices: Iterator[int] = iter(DistributedSampler(Samples(), num_replicas=RANKS, rank=RANK))
    next(itertools.islice(indices, step * BATCH // RANKS, None))


def milliseconds(call: Callable[[], None]) -> float:
    """Return how long a call takes."""
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


def cases(rounds: int) -> Iterator[Case]:
    """Yield the comparisons."""
    for name, step in (("the start", 0), ("the middle", SAMPLES // BATCH // 2)):
        ways = {"hpcddp": with_hpcddp, "DistributedSampler": with_torch}
        yield in_turn(
            f"first index at {name} of 1e8 samples",
            {way: partial(milliseconds, partial(function, step)) for way, function in ways.items()},
            base="DistributedSampler",
            unit="ms",
            rounds=rounds,
        )


if __name__ == "__main__":
    main("benchmarks.sampler", __doc__, cases, rounds=3)
