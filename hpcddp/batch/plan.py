"""The batch plan: from a global batch and a world size to who gets how many samples (batch contract, sections 1, 2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

from hpcddp.batch import refusals
from hpcddp.batch.refusals import PlanError
from hpcddp.batch.split import ceil_div, divide, part, runs
from hpcddp.spec.batch import Split, Tail

__all__ = ["BatchPlan", "PlanError", "accumulation_for", "has_single_sample", "plan_batch", "refuse_single_sample"]

# How far the search for a number that works goes; each try is a few divisions.
_TRIES = 1000


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
        samples: N, samples of the training data; None = unknown.
        tail: what becomes of an epoch's last batch.
    """

    global_batch_size: int
    world_size: int
    grad_accum_steps: int
    max_per_device_batch_size: int | None = None
    samples: int | None = None
    tail: Tail = "keep"

    @property
    def per_rank_samples(self) -> tuple[int, ...]:
        """``[W]``: samples of a full global batch per rank; one more on the first B mod W ranks."""
        return divide(self.global_batch_size, self.world_size)

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
        return divide(part(batch, self.world_size, rank), self.grad_accum_steps)

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

    def micro_batch_sizes(self, batch: int) -> frozenset[int]:
        """Return the different ``n[r,a]`` of a global batch of ``batch`` samples: three numbers at most."""
        shares = runs(batch, self.world_size)
        return frozenset(size for _, share in shares for _, size in runs(share, self.grad_accum_steps))

    def first_single(self, batch: int) -> tuple[int, int]:
        """Return (rank, micro-step) of the first micro-batch of one sample in a global batch that has one."""
        # Shares fall by one sample once, and micro-batches likewise: the first rank of each kind stands for all.
        for rank in (0, batch % self.world_size):
            share = part(batch, self.world_size, rank)
            for micro_step in (0, share % self.grad_accum_steps):
                if part(share, self.grad_accum_steps, micro_step) == 1:
                    return rank, micro_step
        raise ValueError(f"a global batch of {batch} samples has no micro-batch of one")


def plan_batch(
    *,
    global_batch_size: int,
    world_size: int,
    samples: int | None,
    max_per_device_batch_size: int | None = None,
    grad_accum_steps: int | None = None,
    tail: Tail = "keep",
    split: Split = "exact",
) -> BatchPlan:
    """Split a global batch over ranks and micro-steps; nothing is rounded (batch contract, sections 1 and 2).

    Args:
        global_batch_size: B >= 1, samples per optimizer step over all ranks and micro-steps.
        world_size: W >= 1, ranks; never more than B.
        samples: N >= 1, samples of the training data; None = unknown.
        max_per_device_batch_size: m >= 1, the most samples in one micro-batch; None = no limit.
        grad_accum_steps: A >= 1 as said by hand; None = ``max(1, ceil(ceil(B/W) / m))``.
        tail: what becomes of an epoch's last batch: kept as it is, dropped, or filled from the order's beginning.
        split: ``exact`` lets shares differ by one sample; ``error`` refuses a B that W does not divide.

    Returns:
        The plan.

    Raises:
        PlanError: the numbers do not fit; the sentence names some that do.
    """
    refusals.refuse_below_one(
        global_batch_size=global_batch_size,
        world_size=world_size,
        samples=samples,
        max_per_device_batch_size=max_per_device_batch_size,
        grad_accum_steps=grad_accum_steps,
    )
    refusals.refuse_idle_ranks(global_batch_size, world_size)
    if split == "error":
        refusals.refuse_uneven(global_batch_size, world_size)
    needed = accumulation_for(global_batch_size, world_size, max_per_device_batch_size)
    if grad_accum_steps is not None:
        share = ceil_div(global_batch_size, world_size)
        refusals.refuse_over_cap(share, grad_accum_steps, max_per_device_batch_size, needed)
    if samples is not None and tail == "drop":
        refusals.refuse_empty_epoch(samples, global_batch_size)
    return BatchPlan(
        global_batch_size=global_batch_size,
        world_size=world_size,
        grad_accum_steps=grad_accum_steps or needed,
        max_per_device_batch_size=max_per_device_batch_size,
        samples=samples,
        tail=tail,
    )


def accumulation_for(global_batch_size: int, world_size: int, max_per_device_batch_size: int | None) -> int:
    """Return ``A = max(1, ceil(ceil(B/W) / m))``, the fewest micro-steps that respect the cap m; 1 without one."""
    if max_per_device_batch_size is None:
        return 1
    return max(1, ceil_div(ceil_div(global_batch_size, world_size), max_per_device_batch_size))


def refuse_single_sample(plan: BatchPlan) -> None:
    """Refuse a plan that gives a micro-batch of one sample to a model with BatchNorm that normalises per rank.

    torch refuses to take a variance over one value per channel, and would do so in the middle of the training
    (batch contract, section 2).

    Args:
        plan: the plan of a job whose model has BatchNorm in local mode.

    Raises:
        PlanError: some ``n[r,a]`` of some step is 1; the sentence names that step and the ways out.
    """
    for step, batch in plan.distinct_batches():
        if 1 in plan.micro_batch_sizes(batch):
            rank, micro_step = plan.first_single(batch)
            refusals.refuse_single(step=step, batch=batch, rank=rank, micro_step=micro_step, ways_out=_ways_out(plan))


def has_single_sample(plan: BatchPlan) -> bool:
    """Return whether some micro-batch of some step has one sample."""
    return any(1 in plan.micro_batch_sizes(batch) for _, batch in plan.distinct_batches())


def _ways_out(plan: BatchPlan) -> list[str]:
    """Return the changes that leave no micro-batch of one sample, each of them tried."""
    ways = []
    droppable = plan.tail == "keep" and plan.samples is not None and plan.samples >= plan.global_batch_size
    if droppable and not has_single_sample(replace(plan, tail="drop")):
        ways.append("tail 'drop'")
    batch, world = plan.global_batch_size, plan.world_size
    batches = chain(range(batch + 1, batch + _TRIES), range(batch - 1, max(world - 1, batch - _TRIES), -1))
    worlds = range(world - 1, max(0, world - _TRIES), -1)
    other_batch = next((other for other in batches if _works(plan, other, world)), None)
    other_world = next((other for other in worlds if _works(plan, batch, other)), None)
    ways += [] if other_batch is None else [f"global_batch_size {other_batch}"]
    ways += [] if other_world is None else [refusals.count(other_world, "rank")]
    return [*ways, "a model without BatchNorm"]


def _works(plan: BatchPlan, batch: int, world: int) -> bool:
    derived = accumulation_for(plan.global_batch_size, plan.world_size, plan.max_per_device_batch_size)
    try:
        other = plan_batch(
            global_batch_size=batch,
            world_size=world,
            samples=plan.samples,
            max_per_device_batch_size=plan.max_per_device_batch_size,
            grad_accum_steps=None if plan.grad_accum_steps == derived else plan.grad_accum_steps,
            tail=plan.tail,
        )
    except PlanError:
        return False
    return not has_single_sample(other)
