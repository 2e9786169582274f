"""From the job to the parts of its training: data, numbers, model, loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from hpcddp.batch.job import JobPlan, plan_job
from hpcddp.batch.plan import BatchPlan, refuse_single_over_ranks, refuse_single_sample
from hpcddp.batch.sampler import GlobalBatches
from hpcddp.batch.scaling import ScaledRule, scaled_hyperparameters
from hpcddp.spec.job import JobSpec
from hpcddp.train.context import TrainContext
from hpcddp.train.data.grouping import with_groups
from hpcddp.train.data.images import Batch, Data
from hpcddp.train.data.loader import Batches, MicroBatchKeys, Placement, choose_workers
from hpcddp.train.data.opening import open_data
from hpcddp.train.data.own import first_samples
from hpcddp.train.data.same import refuse_other_data
from hpcddp.train.errors import TrainingError
from hpcddp.train.evaluation import Evaluator
from hpcddp.train.loop import Loop
from hpcddp.train.metrics import MetricsFile
from hpcddp.train.model_input import Fit, check_model_input
from hpcddp.train.models import build_model, place_model
from hpcddp.train.normalisation import choose_batch_norm, local_batch_norms, synchronised_batch_norms
from hpcddp.train.precision import Precision
from hpcddp.train.progress import Progress
from hpcddp.train.randomness import seed_initialisation
from hpcddp.train.replica import Replica, build_replica
from hpcddp.train.saving import Saver
from hpcddp.train.schedule import Schedule
from hpcddp.train.stepping import Stepper

# Batch contract, section 2: statistics of so few samples are mostly noise.
_FEW_FOR_BATCH_NORM = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What does not change while a training runs.

    Args:
        context: the job and this rank.
        data: the data set.
        plan: the split, from the data's real size.
        scaled: the constants that the learning-rate rule gives.
        schedule: the steps.
        placement: where batches go.
        workers: loader processes of this rank.
    """

    context: TrainContext
    data: Data
    plan: JobPlan
    scaled: ScaledRule
    schedule: Schedule
    placement: Placement
    workers: int


def settle(context: TrainContext) -> Setting:
    """Open the data and derive every number from its real size.

    Raises:
        DataError: the data is missing or damaged, its groups differ, or it is not the same on all ranks.
        PlanError: the batch does not fit the data.
        TrainingError: another number of ranks has started than the job asks for.
    """
    spec, train = context.spec, context.train
    data = open_data(train)
    refuse_other_data(data, rank=context.rank, world_size=context.world_size, device=context.device)
    if spec.batch.group is not None:
        data = with_groups(data, spec.batch.group, context.device)
    smallest = None if data.groups is None else data.groups.smallest
    plan, scaled = plan_job(spec, samples=data.units, smallest_group=smallest), scaled_hyperparameters(spec)
    if plan.batch.world_size != context.world_size:
        raise TrainingError(
            f"the job asks for {plan.batch.world_size} ranks (nodes x tasks per node), but {context.world_size} have "
            "started; start as many as it asks for, or write their number into resources"
        )
    precision = Precision(train.precision, context.device.type)
    return Setting(
        context=context,
        data=data,
        plan=plan,
        scaled=scaled,
        schedule=Schedule(
            plan=plan.batch,
            epochs=train.epochs,
            learning_rate=scaled.course(spec.learning_rate),
            eval_every=train.eval_every,
            every=spec.checkpoint.every,
            count_samples=_sample_counter(spec, data),
        ),
        placement=Placement(context.device, precision.dtype, channels_last=train.channels_last),
        workers=choose_workers(train.num_workers, data, min(context.cpus, spec.resources.cpus_per_task)),
    )


def _global_batches(spec: JobSpec, data: Data) -> GlobalBatches:
    seed = 0 if spec.train is None else spec.train.seed
    return GlobalBatches(data.units, spec.global_batch_size, spec.batch.tail, spec.batch.order, seed)


def _sample_counter(spec: JobSpec, data: Data) -> Callable[[int, int], int] | None:
    """Return a function (epoch, step) -> samples of that global batch; None where the plan says it."""
    groups, batches = data.groups, _global_batches(spec, data)
    return None if groups is None else lambda epoch, step: groups.count(batches.indices(epoch, step))


def make_replica(setting: Setting) -> Replica:
    """Build the model, the same on every rank, try it on real samples, and wrap it.

    Raises:
        ModelError: it cannot be built or does not take the data.
        UserCodeError: the user's model or data failed.
        PlanError: it has BatchNorm, and some micro-batch has one sample.
    """
    context, data, placement = setting.context, setting.data, setting.placement
    train = context.train
    seed_initialisation(train.seed)
    model = build_model(train.model, train.model_args, data.classes)
    choose_batch_norm(model, train.batch_norm, placement.device.type)
    _refuse_single(model, setting.plan.batch)
    place_model(model, placement.device, placement.dtype, channels_last=train.channels_last)
    inputs = placement.place_inputs(first_samples(data.name, data.train, data.classes)[0])
    fit = Fit(model_name=train.model, model_args=train.model_args, dataset=train.dataset, classes=data.classes)
    unused = check_model_input(fit, model, inputs, Precision(train.precision, placement.device.type))
    if unused:
        context.tell(f"note: no gradient reaches {len(unused)} parameters of the model, {unused[0]} for one")
    first_rate = next(setting.schedule.positions(0)).learning_rate
    # A compiled model is made for the shape that it sees first.
    samples = _largest_micro_batch(setting) if train.compile else len(inputs)
    placeholder = inputs[torch.arange(samples, device=inputs.device) % len(inputs)]
    constants = {"optimizer": setting.scaled.optimizer(train.optimizer), "ema_decay": setting.scaled.ema_decay}
    return build_replica(
        train.model_copy(update=constants),
        model,
        placeholder,
        learning_rate=first_rate,
        unused_parameters=_on_any_rank(
            bool(unused) or bool(getattr(model, "find_unused_parameters", False)), placement.device
        ),
    )


def _on_any_rank(flag: bool, device: torch.device) -> bool:  # noqa: FBT001
    """Return whether ``flag`` is set on any rank: ranks that reduce differently would wait for each other forever."""
    most = torch.tensor(float(flag), device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return bool(most.item())


def _refuse_single(model: nn.Module, plan: BatchPlan) -> None:
    """Refuse what leaves BatchNorm a single sample: on one rank where it is local, on all where it is synchronised."""
    if local_batch_norms(model):
        refuse_single_sample(plan)
    if synchronised_batch_norms(model):
        refuse_single_over_ranks(plan)


def _largest_micro_batch(setting: Setting) -> int:
    batch, groups = setting.plan.batch, setting.data.groups
    return batch.rank_share(batch.global_batch_size, rank=0)[0] * (1 if groups is None else groups.largest)


def make_loop(
    setting: Setting, replica: Replica, saver: Saver, metrics: MetricsFile | None, progress: Progress
) -> Loop:
    """Put the parts together.

    Args:
        setting: what does not change.
        replica: what is trained.
        saver: saves it.
        metrics: where rank 0's records go; None on the other ranks.
        progress: where to begin.
    """
    context, batch = setting.context, setting.plan.batch
    evaluator = Evaluator(
        setting.data,
        setting.placement,
        # What fits into memory while training does so without gradients, too.
        batch_size=_largest_micro_batch(setting),
        workers=setting.workers,
        seed=context.train.seed,
        rank=context.rank,
        world_size=context.world_size,
    )
    stepper = Stepper(replica, batch, context.train, _training_batches(setting, progress.step), context.rank)
    return Loop(
        context,
        setting.schedule,
        replica,
        stepper=stepper,
        evaluator=evaluator,
        saver=saver,
        metrics=metrics,
        progress=progress,
    )


def _training_batches(setting: Setting, first_step: int) -> Iterator[Batch]:
    spec, train, data = setting.context.spec, setting.context.train, setting.data
    keys = MicroBatchKeys(
        _global_batches(spec, data),
        setting.plan.batch,
        setting.context.rank,
        groups=data.groups,
        seed=train.seed,
        first_step=first_step,
        last_step=setting.schedule.total_steps,
    )
    return Batches(data, data.train, keys, setting.placement, workers=setting.workers)


def notes_of(setting: Setting, replica: Replica) -> list[str]:
    """Return what the person who reads the log should know beyond the numbers."""
    notes = list(setting.plan.notes)
    batch = setting.plan.batch
    smallest = min(batch.micro_batch_sizes(batch.global_batch_size)) * (batch.smallest_group or 1)
    if local_batch_norms(replica.model) and smallest <= _FEW_FOR_BATCH_NORM:
        notes.append(
            f"BatchNorm sees micro-batches of {smallest} samples, whose statistics are mostly noise; use "
            "train.batch_norm sync, fewer ranks, a larger batch, or a model without BatchNorm."
        )
    if replica.ema is not None:
        notes.append(f"evaluations use averaged weights, of decay {replica.ema.decay:g} per step.")
    return notes
