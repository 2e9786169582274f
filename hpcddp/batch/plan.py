"""The batch plan: from a global batch and a world size to who gets how many samples (batch contract, sections 1, 2)."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from hpcddp.batch import refusals
from hpcddp.batch.batch_plan import BatchPlan
from hpcddp.batch.refusals import PlanError
from hpcddp.batch.split import ceil_div
from hpcddp.spec.batch import Split, Tail, Unit

__all__ = [
    "BatchPlan",
    "PlanError",
    "accumulation_for",
    "has_single_sample",
    "plan_batch",
    "refuse_single_over_ranks",
    "refuse_single_sample",
]

# How far the search for a number that works goes; each try is a few divisions.
_TRIES = 1000


def plan_batch(
    *,
    global_batch_size: int,
    world_size: int,
    samples: int | None,
    max_per_device_batch_size: int | None = None,
    grad_accum_steps: int | None = None,
    per_device_batch_size: int | None = None,
    tail: Tail = "keep",
    split: Split = "exact",
    unit: Unit = "sample",
    smallest_group: int | None = None,
) -> BatchPlan:
    """Split a global batch over ranks and micro-steps; nothing is rounded (batch contract, sections 1 and 2).

    Args:
        global_batch_size: B >= 1, samples per optimizer step over all ranks and micro-steps.
        world_size: W >= 1, ranks; never more than B.
        samples: N >= 1, samples of the training data; None = unknown.
        max_per_device_batch_size: m >= 1, the most samples in one micro-batch; None = no limit.
        grad_accum_steps: A >= 1 as said by hand; None = ``max(1, ceil(ceil(B/W) / m))``.
        per_device_batch_size: n >= 1 held fixed; then ``A = B / (W * n)``, and neither m nor A is given.
        tail: what becomes of an epoch's last batch: kept as it is, dropped, or filled from the order's beginning.
        split: ``exact`` lets shares differ by one sample; ``error`` refuses a B that W does not divide.
        unit: what the sizes count; where it is ``group``, N and B and all else count groups.
        smallest_group: samples of the smallest group, as far as it is known.

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
        per_device_batch_size=per_device_batch_size,
    )
    refusals.refuse_idle_ranks(global_batch_size, world_size, unit)
    if split == "error":
        refusals.refuse_uneven(global_batch_size, world_size, unit)
    if per_device_batch_size is None:
        needed = accumulation_for(global_batch_size, world_size, max_per_device_batch_size)
        share = ceil_div(global_batch_size, world_size)
        refusals.refuse_over_cap(share, grad_accum_steps, max_per_device_batch_size, needed)
    else:
        refusals.refuse_beside_fixed(
            per_device_batch_size,
            max_per_device_batch_size=max_per_device_batch_size,
            grad_accum_steps=grad_accum_steps,
        )
        refusals.refuse_unfilled(global_batch_size, world_size, per_device_batch_size)
        needed = global_batch_size // (world_size * per_device_batch_size)
    if samples is not None and tail == "drop":
        refusals.refuse_empty_epoch(samples, global_batch_size, unit)
    return BatchPlan(
        global_batch_size=global_batch_size,
        world_size=world_size,
        grad_accum_steps=grad_accum_steps or needed,
        max_per_device_batch_size=max_per_device_batch_size,
        per_device_batch_size=per_device_batch_size,
        samples=samples,
        tail=tail,
        unit=unit,
        smallest_group=smallest_group,
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
    if not has_single_sample(plan):
        return
    for step, batch in plan.distinct_batches():
        if 1 in plan.micro_batch_sizes(batch):
            rank, micro_step = plan.first_single(batch)
            refusals.refuse_single(
                step=step, batch=batch, rank=rank, micro_step=micro_step, ways_out=_ways_out(plan), unit=plan.unit
            )


def has_single_sample(plan: BatchPlan) -> bool:
    """Return whether some micro-batch of some step has one sample, or may have: one group, some being of one sample."""
    if plan.unit == "group" and plan.smallest_group != 1:
        return False
    return any(1 in plan.micro_batch_sizes(batch) for _, batch in plan.distinct_batches())


def refuse_single_over_ranks(plan: BatchPlan) -> None:
    """Refuse a plan with a micro-step of one sample over all ranks, where BatchNorm over all of them has no variance.

    Args:
        plan: the plan of a job whose model has BatchNorm in sync mode.

    Raises:
        PlanError: names the step.
    """
    single = _single_over_ranks(plan)
    if single is not None:
        refusals.refuse_single_over_ranks(*single, unit=plan.unit)


def _single_over_ranks(plan: BatchPlan) -> tuple[int, int, int] | None:
    """Return (step, its units, micro-step) of the first micro-step with one unit over all ranks."""
    if plan.unit == "group" and plan.smallest_group != 1:
        return None
    for step, batch in plan.distinct_batches():
        micro_step = 0
        for micro_steps, units in plan.together_runs(batch):
            if units == 1:
                return step, batch, micro_step
            micro_step += micro_steps
    return None


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
    ways += ["train.batch_norm sync"] if _single_over_ranks(plan) is None else []
    return [*ways, "a model without BatchNorm"]


def _works(plan: BatchPlan, batch: int, world: int) -> bool:
    derived = accumulation_for(plan.global_batch_size, plan.world_size, plan.max_per_device_batch_size)
    follows = plan.per_device_batch_size is not None or plan.grad_accum_steps == derived
    try:
        other = plan_batch(
            global_batch_size=batch,
            world_size=world,
            samples=plan.samples,
            max_per_device_batch_size=plan.max_per_device_batch_size,
            grad_accum_steps=None if follows else plan.grad_accum_steps,
            per_device_batch_size=plan.per_device_batch_size,
            tail=plan.tail,
            unit=plan.unit,
            smallest_group=plan.smallest_group,
        )
    except PlanError:
        return False
    return not has_single_sample(other)
