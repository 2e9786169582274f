"""The split of a global batch over ranks and micro-steps, and of an epoch into steps (batch contract, 1 and 2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Final

from hpcddp.batch.split import ceil_div, divide, fill, offset, part
from hpcddp.errors import UserError, counted
from hpcddp.jobfile.batch_rules import fixed_way_out, why_ranks_idle
from hpcddp.jobfile.sections import Split, Tail, Unit

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


# Limit of the search for a valid number; each try takes a few divisions.
_TRIES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """The number of samples of each rank and micro-step, and the steps of an epoch.

    Made by ``plan_batch``, which checks the numbers against each other. Global batches depend on ``samples``,
    ``global_batch_size`` and ``tail`` only; the world size and accumulation change only the split.

    Args:
        global_batch_size: B, samples per optimizer step over all ranks and micro-steps.
        world_size: W, ranks.
        grad_accum_steps: A, micro-steps per optimizer step, the same on every rank in every step.
        max_per_device_batch_size: m, the most samples in one micro-batch; None = no limit.
        per_device_batch_size: n, if the size of the micro-batches is fixed; only the last ones of an incomplete global
            batch are smaller. The micro-batches are then the same for every world size. None = not fixed.
        samples: N, samples of the training data; None = unknown.
        tail: treatment of an epoch's last batch.
        unit: what all these sizes count. With ``group``, read "groups" for "samples" in this class.
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
        return self.shares(self.global_batch_size)

    @property
    def micro_batches(self) -> tuple[tuple[int, ...], ...]:
        """``[W][A]``: samples of a full global batch per rank and micro-step."""
        return self.share(self.global_batch_size)

    @property
    def imbalance(self) -> float:
        """The relative cost of an uneven split: ``ceil(B/W) * W / B - 1``; 0 when W divides B."""
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
        if self.samples_per_epoch is None:
            return None
        return max(0, self.samples_per_epoch - (self.samples or 0))

    @property
    def dropped(self) -> int | None:
        """Samples that an epoch omits: ``N mod B`` when the tail is dropped (different ones each epoch), else 0."""
        if self.samples_per_epoch is None:
            return None
        return max(0, (self.samples or 0) - self.samples_per_epoch)

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
            return divide(part(batch, self.world_size, rank), self.grad_accum_steps)
        return fill(max(batch - rank * size * self.grad_accum_steps, 0), size, self.grad_accum_steps)

    def rank_offset(self, batch: int, rank: int) -> int:
        """Return where the share of one rank begins in a global batch of ``batch`` samples."""
        if self.per_device_batch_size is None:
            return offset(batch, self.world_size, rank)
        return min(batch, rank * self.per_device_batch_size * self.grad_accum_steps)

    def shares(self, batch: int) -> tuple[int, ...]:
        """Return the ranks' shares of a global batch, in rank order."""
        if self.per_device_batch_size is None:
            return divide(batch, self.world_size)
        return fill(batch, self.per_device_batch_size * self.grad_accum_steps, self.world_size)

    def micro_batches_of(self, share: int) -> tuple[int, ...]:
        """Return the micro-batches of a rank's share, in order."""
        if self.per_device_batch_size is None:
            return divide(share, self.grad_accum_steps)
        return fill(share, self.per_device_batch_size, self.grad_accum_steps)

    def batch_size(self, step: int) -> int:
        """Return b, the samples of the global batch in step ``step`` of an epoch (0..S-1): B, or the tail's."""
        last = None
        if self.steps_per_epoch is not None:
            last = self.steps_per_epoch - 1
        if step < 0 or (last is not None and step > last):
            raise ValueError(f"a step of an epoch is 0..{last}, not {step}")
        if step == last and self.tail_samples is not None:
            return self.tail_samples
        return self.global_batch_size

    def distinct_batches(self) -> Iterator[tuple[int, int]]:
        """Yield (first step, samples) for each size of global batch that occurs in an epoch: one or two."""
        if self.steps_per_epoch != 1:
            yield 0, self.global_batch_size
        if self.steps_per_epoch is not None and (self.steps_per_epoch == 1 or self.tail_samples != self.batch_size(0)):
            yield self.steps_per_epoch - 1, self.batch_size(self.steps_per_epoch - 1)

    def micro_steps(self, batch: int) -> list[int]:
        """Return the sum of all ranks' samples in each micro-step."""
        sums = [0] * self.grad_accum_steps
        for share, ranks in Counter(self.shares(batch)).items():
            for micro_step, size in enumerate(self.micro_batches_of(share)):
                sums[micro_step] += ranks * size
        return sums

    def micro_batch_sizes(self, batch: int) -> frozenset[int]:
        """Return the distinct ``n[r,a]`` of a global batch of ``batch`` samples."""
        return frozenset(chain.from_iterable(map(self.micro_batches_of, set(self.shares(batch)))))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStart:
    """Where a training begins to take global batches of one size: at its beginning, or where a resumption changes it.

    Args:
        global_batch_size: B from here on.
        step: optimizer steps done before.
        epoch: the epoch of the next step, zero-based.
        offset_samples: samples of that epoch that earlier steps have taken, 0..N-1; groups with ``unit: group``.
    """

    global_batch_size: int
    step: int = 0
    epoch: int = 0
    offset_samples: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The steps of a training from a start on: their epochs, their place in the order, and the end of the training.

    The epoch of the start may have begun with batches of another size; what is left of it is an epoch of N - offset
    samples, with the same tail policy (batch contract, section 6).

    Args:
        plan: the batch plan, with a known number of samples.
        start: the start; the default is the beginning of the training.
    """

    plan: BatchPlan
    start: BatchStart

    @classmethod
    def from_beginning(cls, plan: BatchPlan) -> Steps:
        """Return the steps of a training whose batches have had the size of the plan from its beginning."""
        return cls(plan=plan, start=BatchStart(global_batch_size=plan.global_batch_size))

    @property
    def plans(self) -> tuple[BatchPlan, ...]:
        """The plans of all epochs from the start on, each once."""
        return tuple(dict.fromkeys((self.plan_of(self.start.epoch), self.plan)))

    def plan_of(self, epoch: int) -> BatchPlan:
        """Return the plan of an epoch: of its samples that no earlier step has taken."""
        taken = self._taken(epoch)
        return replace(self.plan, samples=(self.plan.samples or 0) - taken) if taken else self.plan

    def count(self, epoch: int) -> int:
        """Return the steps of an epoch from the start on."""
        return self.plan_of(epoch).steps_per_epoch or 0

    def total(self, epochs: int) -> int:
        """Return the optimizer steps of the whole training, those before the start included."""
        epochs_left = epochs - self.start.epoch
        if epochs_left <= 0:
            return self.start.step
        return self.start.step + self.count(self.start.epoch) + (epochs_left - 1) * self._full

    def place(self, step: int) -> tuple[int, int]:
        """Return the epoch of a step, and its number in the epoch, counted from the start in the epoch of the start.

        Args:
            step: optimizer steps done before it; not fewer than at the start.
        """
        done = step - self.start.step
        first = self.count(self.start.epoch)
        if done < 0:
            raise ValueError(f"these batches begin with step {self.start.step}, not with {step}")
        if done < first:
            return self.start.epoch, done
        epochs, step_in_epoch = divmod(done - first, self._full)
        return self.start.epoch + 1 + epochs, step_in_epoch

    def offset(self, epoch: int, step_in_epoch: int) -> int:
        """Return where the batch of a step begins in the order of its epoch."""
        return self._taken(epoch) + step_in_epoch * self.plan.global_batch_size

    def schedule_step(self, epoch: int, step_in_epoch: int) -> float:
        """Return the step at which this place would be if all batches had the size of the plan.

        Schedules count epochs, so that the place in the epoch decides. It is a whole number where no batch has changed.
        """
        return epoch * self._full + self.offset(epoch, step_in_epoch) / self.plan.global_batch_size

    def change(self, step: int, global_batch_size: int) -> BatchStart:
        """Return the start of batches of another size.

        Args:
            step: optimizer steps done before; not fewer than at the start.
            global_batch_size: B from there on.
        """
        epoch, step_in_epoch = self.place(step)
        start = BatchStart(
            global_batch_size=global_batch_size,
            step=step,
            epoch=epoch,
            offset_samples=self.offset(epoch, step_in_epoch),
        )
        changed = Steps(plan=replace(self.plan, global_batch_size=global_batch_size), start=start)
        # Fewer samples than a batch are left, and the tail is dropped: the epoch has no step any more.
        return start if changed.count(epoch) else replace(start, epoch=epoch + 1, offset_samples=0)

    @property
    def _full(self) -> int:
        return self.plan.steps_per_epoch or 0

    def _taken(self, epoch: int) -> int:
        return self.start.offset_samples if epoch == self.start.epoch else 0


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
        grad_accum_steps: A >= 1, if given; None = ``max(1, ceil(ceil(B/W) / m))``.
        per_device_batch_size: n >= 1, if it is fixed; then ``A = B / (W * n)``, and neither m nor A is given.
        tail: treatment of an epoch's last batch: ``keep``, ``drop``, or ``wrap``, which fills it from the beginning.
        split: ``exact`` lets shares differ by one sample; ``error`` rejects a B that W does not divide.
        unit: what the sizes count; where it is ``group``, N and B and all else count groups.
        smallest_group: samples of the smallest group; None = unknown.

    Returns:
        The plan.

    Raises:
        PlanError: the numbers do not fit together; the message names some that do.
    """
    refuse_below_one(
        global_batch_size=global_batch_size,
        world_size=world_size,
        samples=samples,
        max_per_device_batch_size=max_per_device_batch_size,
        grad_accum_steps=grad_accum_steps,
        per_device_batch_size=per_device_batch_size,
    )
    refuse_idle_ranks(global_batch_size, world_size, unit)
    if split == "error":
        refuse_uneven(global_batch_size, world_size, unit)
    if per_device_batch_size is not None:
        refuse_given_with_fixed(
            per_device_batch_size,
            max_per_device_batch_size=max_per_device_batch_size,
            grad_accum_steps=grad_accum_steps,
        )
        refuse_unfilled(global_batch_size, world_size, per_device_batch_size)
        grad_accum_steps = global_batch_size // (world_size * per_device_batch_size)
    elif grad_accum_steps is None:
        grad_accum_steps = accumulation_for(global_batch_size, world_size, max_per_device_batch_size)
    elif max_per_device_batch_size is not None:
        largest_share = ceil_div(global_batch_size, world_size)
        refuse_over_cap(largest_share, grad_accum_steps, max_per_device_batch_size)
    refuse_too_many_micro_batches(world_size, grad_accum_steps)
    if samples is not None and tail == "drop":
        refuse_empty_epoch(samples, global_batch_size, unit)
    return BatchPlan(
        global_batch_size=global_batch_size,
        world_size=world_size,
        grad_accum_steps=grad_accum_steps,
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
    """Reject a plan with a micro-batch of one sample, for a model with local BatchNorm.

    torch raises an error for a variance over one value per channel, in the middle of the training (batch contract,
    section 2).

    Raises:
        PlanError: some ``n[r,a]`` of some step is 1; the message names that step and what to change.
    """
    if not has_single_sample(plan):
        return
    for step, batch in plan.distinct_batches():
        for rank, share in enumerate(plan.shares(batch)):
            sizes = plan.micro_batches_of(share)
            if 1 in sizes:
                micro_step = sizes.index(1)
                alone = ", some groups have one sample" if plan.unit == "group" else ""
                raise PlanError(
                    f"step {step} of every epoch has {counted(batch, plan.unit)}, which leaves rank {rank} one "
                    f"{plan.unit} in micro-step {micro_step}{alone}, and BatchNorm has no variance over one sample; "
                    f"use {' or '.join(_ways_out(plan))}",
                    step=step,
                    batch=batch,
                    rank=rank,
                    micro_step=micro_step,
                )


def has_single_sample(plan: BatchPlan) -> bool:
    """Return whether some micro-batch has one sample, or one group where some group has one sample."""
    if plan.unit == "group" and plan.smallest_group != 1:
        return False
    return any(1 in plan.micro_batch_sizes(batch) for _, batch in plan.distinct_batches())


def refuse_single_over_ranks(plan: BatchPlan) -> None:
    """Reject a plan with a micro-step of one sample over all ranks, for a model with synchronised BatchNorm.

    Raises:
        PlanError: names the step.
    """
    single = _single_over_ranks(plan)
    if single is None:
        return
    step, batch, micro_step = single
    drop = "tail 'drop', " if step else ""
    raise PlanError(
        f"step {step} of every epoch has {counted(batch, plan.unit)}, which leaves one {plan.unit} to all ranks "
        f"together in micro-step {micro_step}, and BatchNorm has no variance over one sample; use {drop}another "
        "global_batch_size, or a model without BatchNorm",
        step=step,
        batch=batch,
        micro_step=micro_step,
    )


def _single_over_ranks(plan: BatchPlan) -> tuple[int, int, int] | None:
    """Return (step, its units, micro-step) of the first micro-step with one unit over all ranks."""
    if plan.unit == "group" and plan.smallest_group != 1:
        return None
    for step, batch in plan.distinct_batches():
        units = plan.micro_steps(batch)
        if 1 in units:
            return step, batch, units.index(1)
    return None


def _ways_out(plan: BatchPlan) -> list[str]:
    """Return changes that avoid micro-batches of one sample; each one was tried on the plan."""
    ways = []
    droppable = plan.tail == "keep" and plan.samples is not None and plan.samples >= plan.global_batch_size
    if droppable and not has_single_sample(replace(plan, tail="drop")):
        ways.append("tail 'drop'")
    batch = plan.global_batch_size
    larger_batches = range(batch + 1, batch + _TRIES)
    smaller_batches = range(batch - 1, max(plan.world_size - 1, batch - _TRIES), -1)
    nearest = next((size for size in chain(larger_batches, smaller_batches) if _works(plan, size)), None)
    if nearest is not None:
        ways.append(f"global_batch_size {nearest}")
    if _single_over_ranks(plan) is None:
        ways.append("train.batch_norm sync")
    ways.append("a model without BatchNorm")
    return ways


def _works(plan: BatchPlan, batch: int) -> bool:
    """Return whether the plan with another batch is valid, and has no micro-batch of one sample."""
    steps = max(plan.grad_accum_steps, accumulation_for(batch, plan.world_size, plan.max_per_device_batch_size))
    if plan.per_device_batch_size is not None:
        steps, rest = divmod(batch, plan.world_size * plan.per_device_batch_size)
        if rest:
            return False
    if plan.tail == "drop" and plan.samples is not None and plan.samples < batch:
        return False
    return not has_single_sample(replace(plan, global_batch_size=batch, grad_accum_steps=steps))
