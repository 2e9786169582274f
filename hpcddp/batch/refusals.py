"""Errors about a batch or a learning rate that a job cannot have, with numbers that work."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Final

from hpcddp.batch.split import ceil_div
from hpcddp.errors import UserError, counted
from hpcddp.jobfile.batch_rules import fixed_way_out, why_ranks_idle
from hpcddp.jobfile.sections import Unit

_MOST_MICRO_BATCHES: Final = 1_000_000


class PlanError(UserError):
    """A batch cannot be split as requested; the message names numbers that can."""

    kind = "plan"


def refuse_below_one(**numbers: int | None) -> None:
    """Reject any given number below 1."""
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise PlanError(f"{name} is {number}, and there is nothing to split below 1; write 1 or more", name=name)


def refuse_accumulated_global_loss(steps: int) -> None:
    """Reject micro-steps under a loss over the global batch, which needs all samples before its first backward."""
    if steps > 1:
        raise PlanError(
            f"train.loss_reduction is global, and grad_accum_steps is {steps}: no call of the loss then gets all "
            "samples of a global batch; use more ranks, allow more samples per device, or make the two passes of a "
            "function of sums in a loop of your own (hpcddp.accumulate_additive)",
            grad_accum_steps=steps,
        )


def refuse_idle_ranks(batch: int, world: int, unit: Unit) -> None:
    """Reject B < W."""
    why = why_ranks_idle(batch, world, unit)
    if why is not None:
        raise PlanError(f"global_batch_size {why}", global_batch_size=batch, world_size=world)


def refuse_uneven(batch: int, world: int, unit: Unit) -> None:
    """Reject a B that W does not divide: ``split: error``."""
    remainder = batch % world
    if remainder:
        below = batch - remainder
        above = batch - remainder + world
        raise PlanError(
            f"global_batch_size is {batch}, which {world} ranks do not divide, and split is 'error'; "
            f"write {below} or {above}, or split 'exact' for shares that differ by one {unit}",
            below=below,
            above=above,
        )


def refuse_unequal_micro_batches(batch: int, world: int, steps: int, *, cap: int | None = None) -> None:
    """Reject a B that W * A does not divide, for a command, which would use another global batch than the job's.

    Args:
        cap: the cap m from which A follows; None if A is given.
    """

    def is_equal(size: int) -> bool:
        share = size // world
        steps_of_size = steps if cap is None else ceil_div(share, cap)
        return size % (world * steps_of_size) == 0

    if is_equal(batch):
        return
    nearest = batch - batch % world
    below = next(filter(is_equal, range(nearest, 0, -world)), None)
    above = next(filter(is_equal, count(nearest + world, world)))
    sizes = str(above) if below is None else f"{below} or {above}"
    parts = f"{world} ranks"
    if steps > 1:
        parts += f" x {steps} micro-steps"
    raise PlanError(
        f"batch.global_batch_size is {batch}, which {parts} cannot share evenly; write {sizes}; only the built-in "
        "training takes uneven shares",
        below=below,
        above=above,
    )


def refuse_over_cap(share: int, steps: int, cap: int) -> None:
    """Reject a given A that makes a micro-batch larger than the cap m; ``share`` is the largest of a rank."""
    largest = ceil_div(share, steps)
    if largest > cap:
        needed = ceil_div(share, cap)
        raise PlanError(
            f"grad_accum_steps is {steps}, which makes micro-batches of {largest} samples from a share of {share}, and "
            f"max_per_device_batch_size allows {cap}; write grad_accum_steps {needed} or more, leave it out, or allow "
            f"{largest} samples",
            grad_accum_steps=steps,
            needed=needed,
        )


def refuse_too_many_micro_batches(world: int, steps: int) -> None:
    """Reject a step whose micro-batches nobody could list."""
    if world * steps > _MOST_MICRO_BATCHES:
        raise PlanError(
            f"{counted(world, 'rank')} x {counted(steps, 'micro-step')} are more than {_MOST_MICRO_BATCHES:,} "
            "micro-batches in one optimizer step; write fewer ranks, fewer micro-steps, or more samples per device"
        )


def refuse_given_with_fixed(size: int, **others: int | None) -> None:
    """Reject a number that follows from a fixed micro-batch size."""
    for name, number in others.items():
        if number is not None:
            raise PlanError(
                f"{name} is {number}, and follows from per_device_batch_size, which is {size}; keep one of them",
                name=name,
            )


def refuse_unfilled(batch: int, world: int, size: int) -> None:
    """Reject a fixed micro-batch size n if W * n does not divide B."""
    together = world * size
    if batch % together:
        raise PlanError(
            f"per_device_batch_size is {size}, and {counted(world, 'rank')} make {together} of it in one micro-step, "
            f"which does not divide global_batch_size {batch}; write {fixed_way_out(batch, world, size)}",
            global_batch_size=batch,
            world_size=world,
            per_device_batch_size=size,
        )


def refuse_empty_epoch(samples: int, batch: int, unit: Unit) -> None:
    """Reject N < B when the tail is dropped: an epoch without a step."""
    if samples < batch:
        raise PlanError(
            f"tail is 'drop' and the training data has {counted(samples, unit)}, fewer than one global batch of "
            f"{batch}, so that an epoch would have no step; write global_batch_size {samples} or less, or tail 'keep' "
            "or 'wrap'",
            samples=samples,
            global_batch_size=batch,
        )


def refuse_single(*, step: int, batch: int, rank: int, micro_step: int, ways_out: Sequence[str], unit: Unit) -> None:
    """Reject a micro-batch of one sample in front of BatchNorm; ``ways_out`` are changes that were found to work."""
    alone = ", some groups have one sample" if unit == "group" else ""
    raise PlanError(
        f"step {step} of every epoch has {counted(batch, unit)}, which leaves rank {rank} one {unit} in micro-step "
        f"{micro_step}{alone}, and BatchNorm has no variance over one sample; use {' or '.join(ways_out)}",
        step=step,
        batch=batch,
        rank=rank,
        micro_step=micro_step,
    )


def refuse_single_over_ranks(step: int, batch: int, micro_step: int, *, unit: Unit) -> None:
    """Reject a micro-step of one sample over all ranks in front of BatchNorm over all ranks."""
    drop = "tail 'drop', " if step else ""
    raise PlanError(
        f"step {step} of every epoch has {counted(batch, unit)}, which leaves one {unit} to all ranks together in "
        f"micro-step {micro_step}, and BatchNorm has no variance over one sample; use {drop}another global_batch_size, "
        "or a model without BatchNorm",
        step=step,
        batch=batch,
        micro_step=micro_step,
    )
