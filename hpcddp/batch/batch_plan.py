"""The split of a global batch over ranks and micro-steps, and of an epoch into steps (batch contract, 1 and 2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

from hpcddp.batch.split import ceil_div, filled_runs, offset, part, runs
from hpcddp.spec.batch import Tail, Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """Who gets how many samples of a global batch, and how an epoch is cut into steps.

    Made by ``plan_batch``, which checks the numbers against each other. Global batches depend on ``samples``,
    ``global_batch_size`` and ``tail`` only; the world size and accumulation move the split and nothing else.

    Args:
        global_batch_size: B, samples per optimizer step over all ranks and micro-steps.
        world_size: W, ranks.
        grad_accum_steps: A, micro-steps per optimizer step, the same on every rank in every step.
        max_per_device_batch_size: m, the most samples in one micro-batch; None = no limit.
        per_device_batch_size: n, where it is held fixed: then every micro-batch has n samples, but for the one that
            ends a short last batch, and the micro-batches are the same for every world size.
        samples: N, samples of the training data; None = unknown.
        tail: what becomes of an epoch's last batch.
        unit: what all these sizes count. Where it is ``group``, read "groups" for "samples" on this page.
        smallest_group: samples of the smallest group; None = unknown, or the unit is a sample.
    """

    global_batch_size: int
    world_size: int
    grad_accum_steps: int
    max_per_device_batch_size: int | None = None
    per_device_batch_size: int | None = None
    samples: int | None = None
    tail: Tail = "keep"
    unit: Unit = "sample"
    smallest_group: int | None = None

    @property
    def per_rank_samples(self) -> tuple[int, ...]:
        """``[W]``: samples of a full global batch per rank; one more on the first B mod W ranks."""
        return _unfolded(self.share_runs(self.global_batch_size))

    @property
    def micro_batches(self) -> tuple[tuple[int, ...], ...]:
        """``[W][A]``: samples of a full global batch per rank and micro-step."""
        return self.share(self.global_batch_size)

    @property
    def imbalance(self) -> float:
        """What the uneven split costs, as a fraction: ``ceil(B/W) * W / B - 1``; 0 when W divides B."""
        largest = ceil_div(self.global_batch_size, self.world_size)
        return (largest * self.world_size - self.global_batch_size) / self.global_batch_size

    @property
    def steps_per_epoch(self) -> int | None:
        """S: ``ceil(N/B)``, or ``floor(N/B)`` with the tail dropped; None when N is unknown."""
        if self.samples is None:
            return None
        if self.tail == "drop":
            return self.samples // self.global_batch_size
        return ceil_div(self.samples, self.global_batch_size)

    @property
    def tail_samples(self) -> int | None:
        """Samples in the last step of an epoch: ``N - (S-1)B`` when the tail is kept, else B."""
        if self.samples is None or self.steps_per_epoch is None:
            return None
        if self.tail == "keep":
            return self.samples - (self.steps_per_epoch - 1) * self.global_batch_size
        return self.global_batch_size

    @property
    def samples_per_epoch(self) -> int | None:
        """Samples that an epoch trains on, repeats counted: ``(S-1)B + tail_samples``."""
        if self.steps_per_epoch is None or self.tail_samples is None:
            return None
        return (self.steps_per_epoch - 1) * self.global_batch_size + self.tail_samples

    @property
    def duplicated(self) -> int | None:
        """Repeats per epoch: ``S*B - N`` when the tail wraps, else 0."""
        return None if self.samples_per_epoch is None else max(0, self.samples_per_epoch - (self.samples or 0))

    @property
    def dropped(self) -> int | None:
        """Samples that an epoch leaves out: ``N mod B`` when the tail is dropped (other ones each epoch), else 0."""
        return None if self.samples_per_epoch is None else max(0, (self.samples or 0) - self.samples_per_epoch)

    def share(self, batch: int) -> tuple[tuple[int, ...], ...]:
        """Return ``n[r][a]``, the samples per rank and micro-step, of a global batch of ``batch`` samples (0..B)."""
        return tuple(self.rank_share(batch, rank) for rank in range(self.world_size))

    def rank_share(self, batch: int, rank: int) -> tuple[int, ...]:
        """Return ``n[rank][a]``, the samples per micro-step of one rank; O(A) for any world size."""
        if not 0 <= batch <= self.global_batch_size:
            raise ValueError(f"a global batch has 0..{self.global_batch_size} samples, not {batch}")
        if not 0 <= rank < self.world_size:
            raise ValueError(f"a rank is 0..{self.world_size - 1}, not {rank}")
        size = self.per_device_batch_size
        if size is None:
            share = part(batch, self.world_size, rank)
        else:
            held = size * self.grad_accum_steps
            share = min(max(batch - rank * held, 0), held)
        return _unfolded(self.micro_runs(share))

    def rank_offset(self, batch: int, rank: int) -> int:
        """Return where the share of one rank begins in a global batch of ``batch`` samples."""
        if self.per_device_batch_size is None:
            return offset(batch, self.world_size, rank)
        return min(batch, rank * self.per_device_batch_size * self.grad_accum_steps)

    def share_runs(self, batch: int) -> tuple[tuple[int, int], ...]:
        """Return the ranks' shares of a global batch in rank order, equal neighbours folded: (how many, samples)."""
        if self.per_device_batch_size is None:
            return runs(batch, self.world_size)
        return filled_runs(batch, self.per_device_batch_size * self.grad_accum_steps, self.world_size)

    def micro_runs(self, share: int) -> tuple[tuple[int, int], ...]:
        """Return the micro-batches of a rank's share in order, equal neighbours folded: (how many, samples)."""
        if self.per_device_batch_size is None:
            return runs(share, self.grad_accum_steps)
        return filled_runs(share, self.per_device_batch_size, self.grad_accum_steps)

    def batch_size(self, step: int) -> int:
        """Return b, the samples of the global batch in step ``step`` of an epoch (0..S-1): B, or the tail's."""
        last = None if self.steps_per_epoch is None else self.steps_per_epoch - 1
        if step < 0 or (last is not None and step > last):
            raise ValueError(f"a step of an epoch is 0..{last}, not {step}")
        return self.tail_samples if step == last and self.tail_samples is not None else self.global_batch_size

    def distinct_batches(self) -> Iterator[tuple[int, int]]:
        """Yield (first step, samples) for each size of global batch that occurs in an epoch: one or two."""
        if self.steps_per_epoch != 1:
            yield 0, self.global_batch_size
        if self.steps_per_epoch is not None and (self.steps_per_epoch == 1 or self.tail_samples != self.batch_size(0)):
            yield self.steps_per_epoch - 1, self.batch_size(self.steps_per_epoch - 1)

    def together_runs(self, batch: int) -> tuple[tuple[int, int], ...]:
        """Return the samples of all ranks together per micro-step, in order, folded: (how many micro-steps, samples).

        A few pairs for any world size and accumulation.
        """
        shares = self.share_runs(batch)
        ends = {end for _, share in shares for end in accumulate(many for many, _ in self.micro_runs(share))}
        return tuple(
            (end - begin, sum(ranks * self._micro_batch(share, begin) for ranks, share in shares))
            for begin, end in pairwise(sorted({0} | ends))
        )

    def _micro_batch(self, share: int, micro_step: int) -> int:
        for many, size in self.micro_runs(share):
            if micro_step < many:
                return size
            micro_step -= many
        raise ValueError(f"a share has {self.grad_accum_steps} micro-steps, and this one lies {micro_step} beyond them")

    def micro_batch_sizes(self, batch: int) -> frozenset[int]:
        """Return the different ``n[r,a]`` of a global batch of ``batch`` samples: a few numbers."""
        return frozenset(size for _, share in self.share_runs(batch) for _, size in self.micro_runs(share))

    def first_single(self, batch: int) -> tuple[int, int]:
        """Return (rank, micro-step) of the first micro-batch of one sample in a global batch that has one."""
        rank = 0
        for ranks, share in self.share_runs(batch):
            micro_step = 0
            for micro_steps, size in self.micro_runs(share):
                if size == 1:
                    return rank, micro_step
                micro_step += micro_steps
            rank += ranks
        raise ValueError(f"a global batch of {batch} samples has no micro-batch of one")


def _unfolded(pairs: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    return tuple(size for many, size in pairs for _ in range(many))
