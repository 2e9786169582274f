"""The plan of a job: batch, length, learning rate, notes, and environment variables for a command."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcddp.batch.plan import (
    BatchPlan,
    PlanError,
    plan_batch,
    refuse_accumulated_global_loss,
    refuse_below_one,
    refuse_single_over_ranks,
    refuse_single_sample,
    refuse_unequal_micro_batches,
)
from hpcddp.batch.scaling import Scaling, scaling_of_job
from hpcddp.batch.split import ceil_div
from hpcddp.errors import counted
from hpcddp.jobfile.fields import is_reference
from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.sections import BatchNorm, LearningRate


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """A batch plan with the length of the training and its learning rate.

    Args:
        epochs: epochs of the training; None = unknown.
        learning_rate: the rate after the warm-up and before any decay, scaled by the rule; None = unknown.
        schedule: the job's ``learning_rate`` section, scaled by the rule; None without a job file.
        scaling: the scaled constants; None where no base is known.
        notes: explanations and warnings, one sentence each.
    """

    batch: BatchPlan
    epochs: int | None = None
    learning_rate: float | None = None
    schedule: LearningRate | None = None
    scaling: Scaling | None = None
    notes: tuple[str, ...] = ()

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the whole training: S * epochs; None when either is unknown."""
        if self.batch.steps_per_epoch is None or self.epochs is None:
            return None
        return self.batch.steps_per_epoch * self.epochs

    def as_json(self) -> dict[str, Any]:
        """Return the document of ``hpcddp plan --json``; unknown values are None."""
        batch = self.batch
        scaling: Mapping[str, Any] = dict.fromkeys(("base_learning_rate", "kappa", "rule", "scaled", "fitting"))
        if self.scaling is not None:
            scaling = self.scaling.as_json()
        return {
            "global_batch_size": batch.global_batch_size,
            "world_size": batch.world_size,
            "grad_accum_steps": batch.grad_accum_steps,
            "per_rank_samples": list(batch.per_rank_samples),
            "micro_batches": [list(sizes) for sizes in batch.micro_batches],
            "steps_per_epoch": batch.steps_per_epoch,
            "tail_samples": batch.tail_samples,
            "samples_per_epoch": batch.samples_per_epoch,
            "duplicated": batch.duplicated,
            "dropped": batch.dropped,
            "imbalance": batch.imbalance,
            "learning_rate": self.learning_rate,
            **scaling,
            "total_steps": self.total_steps,
            "unit": batch.unit,
            "notes": list(self.notes),
        }


def plan_job(
    spec: JobSpec,
    *,
    samples: int | None,
    smallest_group: int | None = None,
    notes: Sequence[str] = (),
) -> JobPlan:
    """Return the plan of a job.

    Args:
        samples: N, samples of its training data, or groups with ``unit: group``; None = unknown.
        smallest_group: samples of the smallest group; None = unknown, or the unit is a sample.
        notes: notes to put first, for instance why ``samples`` is unknown.

    Raises:
        PlanError: the batch cannot be split as requested, or not evenly for a command; the learning-rate rule does not
            hold; or a loss over the global batch would be accumulated.
    """
    batch = plan_batch(
        global_batch_size=spec.global_batch_size,
        world_size=spec.world_size,
        samples=samples,
        max_per_device_batch_size=spec.batch.max_per_device_batch_size,
        grad_accum_steps=spec.batch.grad_accum_steps,
        per_device_batch_size=spec.batch.per_device_batch_size,
        tail=spec.batch.tail,
        split=spec.batch.split,
        unit=spec.batch.unit,
        smallest_group=smallest_group,
    )
    if spec.command is not None:
        cap = spec.batch.max_per_device_batch_size if spec.batch.grad_accum_steps is None else None
        refuse_unequal_micro_batches(batch.global_batch_size, batch.world_size, batch.grad_accum_steps, cap=cap)

    epochs = None
    batch_norm: BatchNorm = "local"
    train = spec.train
    if train is not None:
        if train.loss_reduction == "global":
            refuse_accumulated_global_loss(batch.grad_accum_steps)
        epochs = train.epochs
        batch_norm = train.batch_norm

    scaling = None
    learning_rate = None
    schedule = None
    if spec.states_learning_rate:
        scaling = scaling_of_job(spec)
        learning_rate = scaling.scaled.learning_rate
        schedule = scaling.scaled.course(spec.learning_rate)

    all_notes = list(notes)
    if samples is None and not notes:
        all_notes.append(f"The number of {batch.unit}s is unknown; give it with --samples.")
    all_notes += split_notes(batch, batch_norm)
    if train is not None and spec.learning_rate.warmup_epochs >= train.epochs:
        all_notes.append(
            f"learning_rate.warmup_epochs is {spec.learning_rate.warmup_epochs:g} and the training has "
            f"{counted(train.epochs, 'epoch')}: the rate rises until the end of the training."
        )
    if scaling is not None:
        all_notes += _scaling_notes(scaling, batch.global_batch_size)

    return JobPlan(
        batch=batch,
        epochs=epochs,
        learning_rate=learning_rate,
        schedule=schedule,
        scaling=scaling,
        notes=tuple(all_notes),
    )


def plan_each_node_count(spec: JobSpec, plan_one: Callable[[JobSpec], JobPlan]) -> dict[int, JobPlan]:
    """Return the plans of a job by the number of nodes that it may get, in ascending order.

    Args:
        plan_one: returns the plan of the job with one number of nodes.

    Raises:
        PlanError: the batch cannot be split over the ranks of one of these numbers, which the message names.
    """
    plans: dict[int, JobPlan] = {}
    for nodes in spec.node_counts:
        try:
            plans[nodes] = plan_one(spec.sized(nodes))
        except PlanError as error:
            if len(spec.node_counts) == 1:
                raise
            context = f"with {counted(nodes, 'node')} of resources.nodes {spec.resources.nodes}"
            raise PlanError(f"{context}: {error.message}", hint=error.hint, **error.values) from None
    return plans


def has_batch_norm(model: str) -> bool:
    """Return whether a model of torchvision has BatchNorm; False for a model of the user's own, which is not known."""
    if is_reference(model):
        return False
    # Such as vgg16_bn.
    if model.endswith("_bn"):
        return True
    return not model.startswith(("alexnet", "convnext_", "squeezenet", "swin_", "vgg", "vit_"))


def plan_numbers(
    batch: BatchPlan,
    *,
    epochs: int | None,
    learning_rate: float | None,
    scaling: Scaling | None = None,
) -> JobPlan:
    """Return a plan for numbers without a job file.

    Args:
        epochs: epochs of the training; None = unknown.
        learning_rate: the rate after the warm-up; None = unknown.
        scaling: the scaled constants; None = no rule was given.

    Raises:
        PlanError: there is less than one epoch.
    """
    refuse_below_one(epochs=epochs)
    notes = list(split_notes(batch))
    if scaling is not None:
        notes += _scaling_notes(scaling, batch.global_batch_size)
    return JobPlan(
        batch=batch,
        epochs=epochs,
        learning_rate=learning_rate,
        scaling=scaling,
        notes=tuple(notes),
    )


# Up to this many values per channel the batch statistics are poor (Wu and He 2018, "Group Normalization", figure 1).
_SMALL_BATCH_NORM_GROUP = 4


def split_notes(plan: BatchPlan, batch_norm: BatchNorm = "local") -> Iterator[str]:
    """Yield the notes on the split and the steps of an epoch."""
    if plan.unit == "group":
        yield (
            "batch.unit is group: the sizes of the batch count groups, and a step trains on all samples of its groups, "
            "each with the same weight; groups of different sizes make batches of different sizes."
        )
    for sentence in short_epoch(plan):
        yield f"{sentence}."
    yield from _idle_share_notes(plan)
    yield from _batch_norm_notes(plan, batch_norm)


def short_epoch(plan: BatchPlan) -> Iterator[str]:
    """Yield the sentence about data that has fewer samples than one global batch, without a full stop."""
    if plan.samples is None or plan.samples >= plan.global_batch_size:
        return
    step = "with all of them" if plan.tail == "keep" else "which repeats some of them"
    yield (
        f"global_batch_size is {plan.global_batch_size}, and the training data has "
        f"{counted(plan.samples, plan.unit)}, so that an epoch is one step, {step}; write {plan.samples} or less"
    )


def _idle_share_notes(plan: BatchPlan) -> Iterator[str]:
    """Yield the notes on micro-steps, and on ranks, that have no samples."""
    largest_share = ceil_div(plan.global_batch_size, plan.world_size)
    if plan.grad_accum_steps > largest_share:
        yield (
            f"grad_accum_steps is {plan.grad_accum_steps}, more than the {counted(largest_share, plan.unit)} of a "
            "rank: some micro-steps are empty in every step."
        )
    if plan.tail_samples is None:
        return
    idle_ranks = plan.shares(plan.tail_samples).count(0)
    if idle_ranks > 0:
        yield (
            f"The last step of an epoch has {counted(plan.tail_samples, plan.unit)} for {plan.world_size} ranks: "
            f"{counted(idle_ranks, 'rank')} without any, which take part in the step with weight 0."
        )


def _batch_norm_notes(plan: BatchPlan, batch_norm: BatchNorm) -> Iterator[str]:
    """Yield the note on a model with BatchNorm: it is refused, or its statistics are poor or not those of one batch."""
    try:
        if batch_norm == "local":
            refuse_single_sample(plan)
        else:
            refuse_single_over_ranks(plan)
    except PlanError as error:
        yield f"If the model has BatchNorm, the job is refused before its first step: {error.message}."
        return
    if batch_norm == "local":
        note = _small_micro_batch_note(plan)
        if note is not None:
            yield note
    elif plan.grad_accum_steps > 1:
        largest_micro_step = plan.micro_steps(plan.global_batch_size)[0]
        yield (
            f"If the model has BatchNorm: sync takes its statistics over a micro-step of all ranks, "
            f"{largest_micro_step} of {counted(plan.global_batch_size, plan.unit)}; with {plan.grad_accum_steps} "
            "micro-steps that is not one batch, and changes with the number of ranks."
        )


def _small_micro_batch_note(plan: BatchPlan) -> str | None:
    """Return the note on the first step with a micro-batch of 4 samples or fewer; None if there is no such step."""
    samples_per_unit = 1
    if plan.unit == "group":
        if plan.smallest_group is None:
            return None
        samples_per_unit = plan.smallest_group
    for step, batch in plan.distinct_batches():
        smallest = samples_per_unit * min(size for size in plan.micro_batch_sizes(batch) if size > 0)
        if smallest > _SMALL_BATCH_NORM_GROUP:
            continue
        where = f"the last step of every epoch (step {step})" if step else "every step"
        return (
            f"If the model has BatchNorm: in {where} it takes its statistics over micro-batches of {smallest} samples, "
            "and 4 or fewer are poor; use train.batch_norm sync, fewer ranks or a larger batch."
        )
    return None


def _scaling_notes(scaling: Scaling, global_batch_size: int) -> Iterator[str]:
    """Yield the note on a rule that changes nothing, or on a batch that no rule is applied to."""
    rule = scaling.scaled.rule
    tuned_for = scaling.tuned_for
    if rule != "none" and tuned_for is None:
        yield (
            f"learning_rate.rule is {rule}, and changes nothing: learning_rate.base_global_batch_size is null, so "
            "that base is for this job's own batch."
        )
    elif rule == "none" and tuned_for not in {None, global_batch_size}:
        yield (
            f"learning_rate.base {scaling.base:g} was tuned for a global batch of {tuned_for}, and this one has "
            f"{global_batch_size}: rule 'none' leaves it; no rule fits every model (Shallue et al. 2019)."
        )


def batch_variables(batch: BatchPlan, *, learning_rate: float | None) -> dict[str, str]:
    """Return the plan as environment variables of a command.

    Args:
        learning_rate: the rate after the warm-up, scaled by the job's rule; None = unknown.

    Raises:
        PlanError: the global batch is not a whole number of equal micro-batches.
    """
    refuse_unequal_micro_batches(batch.global_batch_size, batch.world_size, batch.grad_accum_steps)
    size = batch.global_batch_size // (batch.world_size * batch.grad_accum_steps)
    variables = {
        "HPCDDP_GLOBAL_BATCH_SIZE": str(batch.global_batch_size),
        "HPCDDP_PER_DEVICE_BATCH_SIZE": str(size),
        "HPCDDP_GRAD_ACCUM_STEPS": str(batch.grad_accum_steps),
        "HPCDDP_RANK_BATCH_SIZE": str(size * batch.grad_accum_steps),
    }
    if learning_rate is not None:
        variables["HPCDDP_LEARNING_RATE"] = repr(learning_rate)
    return variables
