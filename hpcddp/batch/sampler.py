"""The samples of each step, each rank's share of them, and groups of samples (batch contract, sections 1 and 2).

Groups are samples that stay together (few-shot episodes, sequences of one patient). Where the batch counts groups, a
global batch has B groups in the order of the epoch, and the samples of a group follow each other. Groups are numbered
by their first sample, so that the numbers depend only on the data and on the user's function.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterable

import numpy as np  # noqa: TID253  this module is imported late

from hpcddp.batch.order import Indices, KeyedOrder, SampleOrder, TorchOrder
from hpcddp.batch.plan import BatchPlan, BatchStart, Steps, plan_batch
from hpcddp.jobfile.sections import OrderName, Tail

# Positions whose samples are computed together; numpy's calls take about as long for a few of them.
_BLOCK = 4096


class GlobalBatches:
    """The global batches of a training: a function only of seed, epoch, step, N, B, tail, order and start.

    They do not depend on world size, accumulation, nodes or loader workers.

    Args:
        samples: N >= 1, units of the training data: samples, or groups where the batch counts groups.
        global_batch_size: B >= 1.
        tail: treatment of an epoch's last batch.
        order: ``keyed``, or ``torch`` for the order of ``torch.randperm``.
        start: where batches of this size begin; None is the beginning of the training.

    Raises:
        PlanError: the tail is dropped and N < B, so that an epoch has no step.
    """

    def __init__(
        self,
        samples: int,
        global_batch_size: int,
        tail: Tail,
        order: OrderName,
        seed: int,
        *,
        start: BatchStart | None = None,
    ) -> None:
        # Steps and their sizes are the same for every world size.
        plan = plan_batch(global_batch_size=global_batch_size, world_size=1, samples=samples, tail=tail)
        self.steps = Steps.from_beginning(plan) if start is None else Steps(plan=plan, start=start)
        self._samples = samples
        self._make_order = KeyedOrder if order == "keyed" else TorchOrder
        self._seed = seed
        self._current: tuple[int, SampleOrder] | None = None
        # Epoch, first position and samples of the positions that were computed last.
        self._block: tuple[int, int, Indices] = -1, 0, np.empty(0, dtype=np.int64)

    @property
    def steps_per_epoch(self) -> int:
        """S, optimizer steps per epoch."""
        return self.steps.plan.steps_per_epoch or 0

    def indices(self, epoch: int, step: int) -> Indices:
        """Return the samples (or groups) of one global batch, ``[b]``, in the order in which the ranks share it.

        Args:
            epoch: zero-based.
            step: step in the epoch, 0..S-1; counted from the start in the epoch of the start.

        Raises:
            ValueError: there is no such step.
        """
        plan = self.steps.plan_of(epoch)
        first = self.steps.offset(epoch, step)
        end = first + plan.batch_size(step)
        known_epoch, begin, block = self._block
        if epoch != known_epoch or not begin <= first <= end <= begin + len(block):
            last = self.steps.count(epoch) - 1
            epoch_end = self.steps.offset(epoch, last) + plan.batch_size(last)
            begin = first
            block = self._indices_at(epoch, first, max(end, min(first + _BLOCK, epoch_end)))
            self._block = epoch, begin, block
        return block[first - begin : end - begin]

    def _indices_at(self, epoch: int, first: int, end: int) -> Indices:
        # A tail that wraps continues at the beginning of the order, several times if B > N.
        return self._order(epoch)(np.arange(first, end, dtype=np.int64) % self._samples)

    def _order(self, epoch: int) -> SampleOrder:
        if self._current is None or self._current[0] != epoch:
            self._current = epoch, self._make_order(self._samples, self._seed, epoch)
        return self._current[1]


def share_of(plan: BatchPlan, indices: Indices, rank: int) -> list[Indices]:
    """Return the samples (or groups) of one rank, per micro-step: ``[A]`` arrays, some empty when the batch is small.

    Shares are contiguous in rank order, micro-batches contiguous in the share (batch contract, section 2).

    Args:
        plan: the plan of the job.
        indices: a global batch, ``[b]`` with b <= B.
        rank: 0..W-1.
    """
    return [indices[begin:end] for begin, end in _spans(plan, len(indices), rank)]


# Nearly all batches of a training have the same size.
@functools.lru_cache(maxsize=16)
def _spans(plan: BatchPlan, batch: int, rank: int) -> list[tuple[int, int]]:
    """Return where each micro-batch of one rank begins and ends in a global batch, ``[A]``."""
    bounds = itertools.accumulate(plan.rank_share(batch, rank), initial=plan.rank_offset(batch, rank))
    return list(itertools.pairwise(bounds))


class GroupTable:
    """The samples of every group: O(N) integers, the same on every rank.

    Args:
        names: the group of each sample, in the order of the samples; at least one.
    """

    def __init__(self, names: Iterable[int | str]) -> None:
        numbers: dict[int | str, int] = {}
        group_of = np.fromiter((numbers.setdefault(name, len(numbers)) for name in names), dtype=np.int64)
        # A stable sort keeps the samples of a group in their own order.
        self._members: Indices = np.argsort(group_of, kind="stable").astype(np.int64)
        self._sizes: Indices = np.bincount(group_of).astype(np.int64)
        self._starts: Indices = np.cumsum(self._sizes) - self._sizes
        self.digest = hashlib.sha256(group_of.astype("<i8").tobytes()).hexdigest()

    def __len__(self) -> int:
        """Return how many groups there are."""
        return len(self._sizes)

    @property
    def smallest(self) -> int:
        """Samples of the smallest group."""
        return int(self._sizes.min())

    @property
    def largest(self) -> int:
        """Samples of the largest group."""
        return int(self._sizes.max())

    def samples(self, groups: Indices) -> Indices:
        """Return the sample indices of some groups, one group after the other.

        Args:
            groups: numbers of groups, ``[g]``, 0..len-1.
        """
        spans = zip(self._starts[groups].tolist(), self._sizes[groups].tolist(), strict=True)
        parts = [self._members[start : start + size] for start, size in spans]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def count(self, groups: Indices) -> int:
        """Return how many samples some groups have together."""
        return int(self._sizes[groups].sum())
