"""Assembly of a training from its job: data, batch plan, schedule, model and loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from hpcddp.batch.job import JobPlan, plan_job
from hpcddp.batch.plan import BatchStart, Steps, refuse_single_over_ranks, refuse_single_sample
from hpcddp.batch.sampler import GlobalBatches
from hpcddp.batch.scaling import ScaledRule, scaled_hyperparameters
from hpcddp.jobfile.job import JobSpec
from hpcddp.run.metrics_log import MetricsFile
from hpcddp.train.checkpoint.checkpointer import Checkpointer
from hpcddp.train.context import TrainContext
from hpcddp.train.data.loader import Batches, Placement, choose_workers, micro_batch_keys
from hpcddp.train.data.opening import open_data, refuse_other_data, with_groups
from hpcddp.train.data.own import first_samples
from hpcddp.train.data.parts import Data
from hpcddp.train.errors import TrainingError
from hpcddp.train.loop.evaluation import Evaluator
from hpcddp.train.loop.loop import Loop
from hpcddp.train.loop.schedule import Schedule
from hpcddp.train.loop.state import TrainingProgress
from hpcddp.train.loop.step import Stepper
from hpcddp.train.model.models import build_model, check_model_input, place_model
from hpcddp.train.model.normalisation import choose_batch_norm, local_batch_norms, synchronised_batch_norms
from hpcddp.train.model.replica import Replica, build_replica
from hpcddp.train.precision import Precision
from hpcddp.train.randomness import seed_initialisation

# Largest micro-batch whose BatchNorm statistics are mostly noise (batch contract, section 2).
_FEW_FOR_BATCH_NORM: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Everything that stays the same while a training runs.

    Args:
        plan: the batch plan, for the size of the opened data set.
        scaled: the hyperparameters after the learning-rate rule.
        placement: device and layout of the batches.
        workers: loader processes of this rank.
    """

    context: TrainContext
    data: Data
    plan: JobPlan
    scaled: ScaledRule
    schedule: Schedule
    placement: Placement
    workers: int


def derive_setting(context: TrainContext) -> Setting:
    """Open the data and derive every number from its real size.

    Raises:
        DataError: the data is missing or damaged, its groups differ, or it is not the same on all ranks.
        PlanError: the batch does not fit the data.
        TrainingError: the number of ranks is not the one that the job asks for.
    """
    spec = context.spec
    train = context.train
    data = open_data(context.train)
    refuse_other_data(data, rank=context.rank, world_size=context.world_size, device=context.device)
    if spec.batch.group is not None:
        data = with_groups(data, spec.batch.group, context.device)
    smallest_group = None
    if data.groups is not None:
        smallest_group = data.groups.smallest
    plan = plan_job(spec, samples=data.units, smallest_group=smallest_group)
    scaled = scaled_hyperparameters(spec)
    if plan.batch.world_size != context.world_size:
        raise TrainingError(
            f"the job asks for {plan.batch.world_size} ranks (nodes x tasks per node), but {context.world_size} have "
            "started; start as many as it asks for, or write their number into resources"
        )
    steps = Steps.from_beginning(plan.batch)
    schedule = Schedule(
        steps=steps,
        epochs=train.epochs,
        learning_rate=scaled.course(spec.learning_rate),
        eval_every=train.eval_every,
        every=spec.checkpoint.every,
        count_samples=_sample_counter(spec, data, steps.start),
    )
    dtype = Precision(train.precision, context.device.type).dtype
    cpus = min(context.cpus, spec.resources.cpus_per_task)
    return Setting(
        context=context,
        data=data,
        plan=plan,
        scaled=scaled,
        schedule=schedule,
        placement=Placement(context.device, dtype, channels_last=train.channels_last),
        workers=choose_workers(train.num_workers, data, cpus),
    )


def change_start(setting: Setting, start: BatchStart) -> Setting:
    """Return the setting of a training whose batches begin to have the size of its plan at ``start``."""
    schedule = replace(
        setting.schedule,
        steps=Steps(plan=setting.plan.batch, start=start),
        count_samples=_sample_counter(setting.context.spec, setting.data, start),
    )
    return replace(setting, schedule=schedule)


def _sample_counter(spec: JobSpec, data: Data, start: BatchStart) -> Callable[[int, int], int] | None:
    """Return a function (epoch, step) -> samples of that global batch; None if every unit is one sample."""
    groups = data.groups
    if groups is None:
        return None
    batches = _global_batches(spec, data, start)
    return lambda epoch, step: groups.count(batches.indices(epoch, step))


def _global_batches(spec: JobSpec, data: Data, start: BatchStart) -> GlobalBatches:
    seed = 0 if spec.train is None else spec.train.seed
    return GlobalBatches(data.units, spec.global_batch_size, spec.batch.tail, spec.batch.order, seed, start=start)


def make_replica(setting: Setting) -> Replica:
    """Build the model with the same parameters on every rank, check it with two samples, and wrap it in DDP.

    Raises:
        ModelError: the model cannot be built or does not take the data.
        UserCodeError: the user's model or data failed.
        PlanError: the model has BatchNorm, and some micro-batch has one sample.
    """
    context = setting.context
    train = context.train
    data = setting.data
    placement = setting.placement
    seed_initialisation(train.seed)
    model = build_model(train.model, train.model_args, data.classes)
    choose_batch_norm(model, train.batch_norm, placement.device.type)
    for plan in setting.schedule.steps.plans:
        # Batches of one sample for BatchNorm: per rank if it is local, over all ranks if it is synchronised.
        if local_batch_norms(model):
            refuse_single_sample(plan)
        if synchronised_batch_norms(model):
            refuse_single_over_ranks(plan)
    place_model(model, placement.device, placement.dtype, channels_last=train.channels_last)
    inputs = placement.place_inputs(first_samples(data))
    # Else the first validation batch would fail after an epoch.
    first_samples(data, "val")

    precision = Precision(train.precision, placement.device.type)
    unused_names = check_model_input(train, model, inputs, precision, classes=data.classes)
    has_unused = bool(getattr(model, "find_unused_parameters", False))
    if unused_names:
        has_unused = True
        context.print_on_rank_0(
            f"note: no gradient reaches {len(unused_names)} parameters of the model, {unused_names[0]} for one"
        )

    # DDP deadlocks where ranks differ in unused parameters.
    unused_on_any_rank = torch.tensor(float(has_unused), device=placement.device)
    dist.all_reduce(unused_on_any_rank, op=dist.ReduceOp.MAX)

    scaled = setting.scaled
    scaled_train = train.model_copy(
        update={"optimizer": scaled.optimizer(train.optimizer), "ema_decay": scaled.ema_decay}
    )
    first_step = setting.schedule.steps.start.step
    return build_replica(
        scaled_train,
        model,
        _placeholder(setting, inputs),
        learning_rate=setting.schedule.position(first_step).learning_rate,
        unused_parameters=bool(unused_on_any_rank.item()),
        fixed_micro_batch=setting.plan.batch.per_device_batch_size is not None,
    )


def _placeholder(setting: Setting, inputs: Tensor) -> Tensor:
    """Return inputs for micro-steps without samples, made of the first samples of the data."""
    samples = len(inputs)
    if setting.context.train.compile:
        # torch.compile specialises the model for the shape of its first input.
        samples = _largest_micro_batch(setting)
    placeholder = inputs[torch.arange(samples, device=inputs.device) % len(inputs)]
    # A share without samples counts 0, and 0 times what is not finite would not.
    return torch.where(torch.isfinite(placeholder), placeholder, 0)


def _largest_micro_batch(setting: Setting) -> int:
    """Return the most samples that a micro-batch can have."""
    batch = setting.plan.batch
    units = batch.rank_share(batch.global_batch_size, rank=0)[0]
    if setting.data.groups is None:
        return units
    return units * setting.data.groups.largest


def make_loop(
    setting: Setting,
    replica: Replica,
    checkpointer: Checkpointer,
    metrics: MetricsFile | None,
    progress: TrainingProgress,
) -> Loop:
    """Return the loop that trains a replica from ``progress`` on.

    ``metrics`` is None on other ranks than 0.

    Raises:
        TrainingError: ``checkpoint.best`` is a metric that an evaluation does not report.
    """
    context = setting.context
    evaluator = Evaluator(
        setting.data,
        setting.placement,
        # A forward without gradients needs less memory than a training step of this size.
        batch_size=_largest_micro_batch(setting),
        workers=setting.workers,
        seed=context.train.seed,
        rank=context.rank,
        world_size=context.world_size,
    )
    best = context.spec.checkpoint.best
    if best is not None and best.metric not in evaluator.metrics:
        raise TrainingError(
            f"checkpoint.best is {best.metric}, and with {setting.data.classes} classes an evaluation reports "
            f"{', '.join(evaluator.metrics)}; write one of these"
        )
    keys = micro_batch_keys(
        _global_batches(context.spec, setting.data, setting.schedule.steps.start),
        setting.plan.batch,
        context.rank,
        groups=setting.data.groups,
        seed=context.train.seed,
        first_step=progress.step,
        last_step=setting.schedule.total_steps,
    )
    batches = Batches(setting.data, setting.data.train, keys, setting.placement, workers=setting.workers)
    stepper = Stepper(replica, setting.plan.batch, context.train, iter(batches), context.rank)
    return Loop(
        context,
        setting.schedule,
        replica,
        stepper=stepper,
        evaluator=evaluator,
        checkpointer=checkpointer,
        metrics=metrics,
        progress=progress,
    )


def notes_of(setting: Setting, replica: Replica) -> list[str]:
    """Return notes for rank 0's log, one sentence each."""
    notes = list(setting.plan.notes)
    batch = setting.plan.batch
    smallest_micro_batch = min(batch.micro_batch_sizes(batch.global_batch_size)) * (batch.smallest_group or 1)
    if local_batch_norms(replica.model) and smallest_micro_batch <= _FEW_FOR_BATCH_NORM:
        notes.append(
            f"BatchNorm sees micro-batches of {smallest_micro_batch} samples, whose statistics are mostly noise; use "
            "train.batch_norm sync, fewer ranks, a larger batch, or a model without BatchNorm."
        )
    if replica.ema is not None:
        notes.append(f"evaluations use averaged weights, of decay {replica.ema.decay:g} per step.")
    return notes
