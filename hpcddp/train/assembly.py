"""From the job to the parts of its training: data, numbers, model, loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hpcddp.batch.job import JobPlan, plan_job
from hpcddp.batch.plan import refuse_single_sample
from hpcddp.batch.sampler import GlobalBatches
from hpcddp.train.checkpoint import Saver
from hpcddp.train.context import TrainContext
from hpcddp.train.data.images import Batch, Data
from hpcddp.train.data.loader import Batches, MicroBatchIndices, Placement, choose_workers
from hpcddp.train.data.opening import open_data
from hpcddp.train.data.own import first_samples
from hpcddp.train.data.same import refuse_other_data
from hpcddp.train.errors import TrainingError
from hpcddp.train.evaluation import Evaluator
from hpcddp.train.loop import Loop
from hpcddp.train.metrics import MetricsFile
from hpcddp.train.model_input import Fit, check_model_input
from hpcddp.train.models import build_model, has_batch_norm, place_model
from hpcddp.train.precision import Precision
from hpcddp.train.progress import Progress
from hpcddp.train.randomness import seed_initialisation
from hpcddp.train.replica import Replica, build_replica
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
        schedule: the steps.
        placement: where batches go.
        workers: loader processes of this rank.
    """

    context: TrainContext
    data: Data
    plan: JobPlan
    schedule: Schedule
    placement: Placement
    workers: int


def settle(context: TrainContext) -> Setting:
    """Open the data and derive every number from its real size.

    Raises:
        DataError: the data is missing or damaged, or not the same on all ranks.
        PlanError: the batch does not fit the data.
        TrainingError: another number of ranks has started than the job asks for.
    """
    spec, train = context.spec, context.train
    data = open_data(train)
    refuse_other_data(data, rank=context.rank, world_size=context.world_size, device=context.device)
    plan = plan_job(spec, samples=len(data.train))
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
        schedule=Schedule(
            plan=plan.batch,
            epochs=train.epochs,
            learning_rate=spec.learning_rate,
            eval_every=train.eval_every,
            every=spec.checkpoint.every,
        ),
        placement=Placement(context.device, precision.dtype, channels_last=train.channels_last),
        workers=choose_workers(train.num_workers, data, min(context.cpus, spec.resources.cpus_per_task)),
    )


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
    if has_batch_norm(model):
        refuse_single_sample(setting.plan.batch)
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
    return build_replica(train, model, placeholder, learning_rate=first_rate, unused_parameters=bool(unused))


def _largest_micro_batch(setting: Setting) -> int:
    batch = setting.plan.batch
    return batch.rank_share(batch.global_batch_size, rank=0)[0]


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
    batches = GlobalBatches(
        len(data.train), spec.batch.global_batch_size, spec.batch.tail, spec.batch.order, train.seed
    )
    indices = MicroBatchIndices(
        batches,
        setting.plan.batch,
        setting.context.rank,
        first_step=first_step,
        last_step=setting.schedule.total_steps,
    )
    return Batches(data, data.train, indices, setting.placement, workers=setting.workers, seed=train.seed)


def notes_of(setting: Setting, replica: Replica) -> list[str]:
    """Return what the person who reads the log should know beyond the numbers."""
    notes = list(setting.plan.notes)
    smallest = min(size for share in setting.plan.batch.micro_batches for size in share)
    if has_batch_norm(replica.model) and smallest <= _FEW_FOR_BATCH_NORM:
        notes.append(
            f"BatchNorm sees micro-batches of {smallest} samples, whose statistics are mostly noise; use fewer "
            "ranks, a larger batch, or a model without BatchNorm."
        )
    return notes
