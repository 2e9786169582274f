"""What a person should know about a plan beyond its numbers: one sentence each."""

from __future__ import annotations

from collections.abc import Iterator

from hpcddp.batch.plan import BatchPlan, refuse_single_over_ranks, refuse_single_sample
from hpcddp.batch.refusals import PlanError, count
from hpcddp.batch.split import ceil_div
from hpcddp.spec.training import BatchNorm

# Below this many values per channel the batch statistics are poor (Wu and He 2018, "Group Normalization", figure 1).
_SMALL_BATCH_NORM_GROUP = 4


def split_notes(plan: BatchPlan, batch_norm: BatchNorm = "local") -> Iterator[str]:
    """Yield the notes on the split and the steps of an epoch.

    Args:
        plan: the plan.
        batch_norm: the job's ``train.batch_norm``.
    """
    if plan.unit == "group":
        yield (
            "batch.unit is group: the sizes of the batch count groups, and a step trains on all samples of its groups, "
            "each with the same weight; groups of different sizes make batches of different sizes."
        )
    yield from _short_epoch(plan)
    yield from _idle_shares(plan)
    yield from _batch_norm(plan, batch_norm)


def _short_epoch(plan: BatchPlan) -> Iterator[str]:
    if plan.samples is None or plan.samples >= plan.global_batch_size:
        return
    if plan.tail == "keep":
        yield (
            f"The training data has {count(plan.samples, plan.unit)}, fewer than one global batch: every step trains "
            f"on {plan.samples}, not on {plan.global_batch_size}."
        )
    else:
        yield (
            f"The training data has {count(plan.samples, plan.unit)}, fewer than one global batch: every step repeats "
            f"some of them to fill {plan.global_batch_size}."
        )


def _idle_shares(plan: BatchPlan) -> Iterator[str]:
    share = ceil_div(plan.global_batch_size, plan.world_size)
    if plan.grad_accum_steps > share:
        yield (
            f"grad_accum_steps is {plan.grad_accum_steps}, more than the {count(share, plan.unit)} of a rank: "
            "some micro-steps are empty in every step."
        )
    idle = 0 if plan.tail_samples is None else sum(many for many, n in plan.share_runs(plan.tail_samples) if not n)
    if plan.tail_samples is not None and idle:
        yield (
            f"The last step of an epoch has {count(plan.tail_samples, plan.unit)} for {plan.world_size} ranks: "
            f"{count(idle, 'rank')} without any, in step with the others and counting nothing."
        )


def _batch_norm(plan: BatchPlan, mode: BatchNorm) -> Iterator[str]:
    try:
        (refuse_single_sample if mode == "local" else refuse_single_over_ranks)(plan)
    except PlanError as error:
        yield f"If the model has BatchNorm, the job is refused before its first step: {error.message}."
        return
    yield from _few_for_batch_norm(plan) if mode == "local" else _parts_of_a_batch(plan)


def _parts_of_a_batch(plan: BatchPlan) -> Iterator[str]:
    if plan.grad_accum_steps > 1:
        together = plan.together_runs(plan.global_batch_size)[0][1]
        yield (
            f"If the model has BatchNorm: sync takes its statistics over a micro-step of all ranks, {together} of "
            f"{count(plan.global_batch_size, plan.unit)}; with {plan.grad_accum_steps} micro-steps that is not one "
            "batch, and changes with the number of ranks."
        )


def _few_for_batch_norm(plan: BatchPlan) -> Iterator[str]:
    if plan.unit == "group" and plan.smallest_group is None:
        return
    for step, batch in plan.distinct_batches():
        smallest = min(size for size in plan.micro_batch_sizes(batch) if size) * (plan.smallest_group or 1)
        if smallest <= _SMALL_BATCH_NORM_GROUP:
            size = f"as few as {smallest}" if plan.unit == "group" else f"{smallest}"
            where = "every step" if step == 0 else f"the last step of every epoch (step {step})"
            ways = "fewer ranks or a larger global batch" if step == 0 else "tail 'drop', fewer ranks or a larger batch"
            parts = (
                f" With {plan.grad_accum_steps} micro-steps sync is not one batch: it takes them over one micro-step "
                "of all ranks."
            )
            yield (
                f"If the model has BatchNorm: in {where} it takes its statistics over micro-batches of {size} "
                f"samples, and 4 or fewer are poor; use train.batch_norm sync, {ways}."
                f"{parts if plan.grad_accum_steps > 1 else ''}"
            )
            return
