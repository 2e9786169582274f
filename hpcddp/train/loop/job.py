"""The built-in training of one rank, from the choice of the checkpoint to ``result.json``."""

from __future__ import annotations

import gc
import hashlib
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcddp.batch.explain import plan_lines
from hpcddp.batch.job import JobPlan, plan_job
from hpcddp.batch.order import CONTRACT_VERSION
from hpcddp.batch.plan import BatchStart, Steps, refuse_single_over_ranks, refuse_single_sample
from hpcddp.batch.sampler import GlobalBatches
from hpcddp.batch.scaling import ScaledRule, scaled_hyperparameters
from hpcddp.errors import counted
from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.sections import Unit
from hpcddp.run.checkpoints import Checkpoint
from hpcddp.run.events import append_event
from hpcddp.run.job_records import read_submission, write_plan_record
from hpcddp.run.metrics import keep_until
from hpcddp.run.metrics_log import MetricsFile
from hpcddp.run.ownership import BATCH, raise_if_fenced
from hpcddp.run.result import FINISHED, Result, finish_run
from hpcddp.train.checkpoint.checkpointer import Checkpointer
from hpcddp.train.checkpoint.start import agree_on_start, refuse_another_contract
from hpcddp.train.context import TrainContext
from hpcddp.train.data.loader import Batches, Data, Placement, choose_workers, micro_batch_keys
from hpcddp.train.data.opening import first_samples, open_data, refuse_other_data, tensor_bytes, with_groups
from hpcddp.train.data.workers import lost_worker
from hpcddp.train.errors import StoppedError, TrainingError
from hpcddp.train.loop.evaluation import Evaluator
from hpcddp.train.loop.loop import Loop
from hpcddp.train.loop.schedule import Schedule
from hpcddp.train.loop.state import TrainingProgress, make_checkpointer, progress_of, restore
from hpcddp.train.loop.step import Stepper
from hpcddp.train.model.normalisation import choose_batch_norm, local_batch_norms, synchronised_batch_norms
from hpcddp.train.model.replica import (
    Replica,
    build_model,
    build_replica,
    check_model_input,
    count_parameters,
    place_model,
)
from hpcddp.train.precision import Precision, set_up_backends
from hpcddp.train.randomness import seed_initialisation
from hpcddp.version import __version__

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


__all__ = ["TrainContext", "run_training"]

_GLOBAL_BATCH: Final = "global_batch_size"
_CONTRACT_LABELS: Final = {
    "version": "the version of the batch contract",
    "seed": "train.seed",
    "samples": "the number of training samples",
    "unit": "batch.unit",
    "fingerprint": "the fingerprint of the training data",
    "global_batch_size": "batch.global_batch_size",
    "tail": "batch.tail",
    "order": "batch.order",
}


def run_training(context: TrainContext) -> None:
    """Train the job's model to the end, from the newest valid checkpoint if there is one.

    The default process group is open. Returns when ``result.json`` is written and every rank has passed a barrier. A
    run that has finished before is not changed.

    Raises:
        TrainingError: see its subclasses; after any exception no collective may be entered.
        NoCheckpointError: there should be a checkpoint, and none is valid.
        FencedError: another attempt owns the run.
        PlanError: the batch does not fit the data or the model.
    """
    start = agree_on_start(context.run, context.attempt, print_line=context.print_on_rank_0, check=progress_of)
    if start.finished:
        context.print_on_rank_0(f"run {context.run.run_id} has finished already; nothing to do")
        return
    try:
        _train_from(context, start.checkpoint)
    except StoppedError:
        # The launcher may end the other ranks as soon as one has exited, so all ranks leave together.
        dist.barrier()
        raise
    except RuntimeError as error:
        # torch reports a lost loader process by an exception at any place of the main thread.
        worker_error = lost_worker(error)
        if worker_error is None:
            raise
        raise worker_error from error
    # Freeing DDP after its process group is destroyed can deadlock, so it is freed before.
    gc.collect()
    dist.barrier()


def _train_from(context: TrainContext, checkpoint: Checkpoint | None) -> None:
    set_up_backends(Precision(context.train.precision, context.device.type), deterministic=context.train.deterministic)
    setting = derive_setting(context)
    contract = contract_of(context.spec, setting.data, context.train.seed)
    batch_starts: tuple[BatchStart, ...] = ()
    if checkpoint is not None:
        # Before the model is built, which may fail because the job is another one.
        batch_starts = _batch_starts(setting, checkpoint, contract)
        if batch_starts:
            setting = change_start(setting, batch_starts[-1])
    replica = make_replica(setting)
    checkpointer = make_checkpointer(context, replica, contract, _information(setting))
    progress = restore(checkpointer, checkpoint, context.attempt, replica, batch_starts)
    metrics = None
    if context.is_main:
        metrics = _open_files(setting, replica, progress)
    loop = make_loop(setting, replica, checkpointer, metrics, progress)
    with context.tracking(first_step=progress.step):
        try:
            progress = loop.run()
        finally:
            checkpointer.abandon()
        if context.is_main:
            _finish(context, replica, progress)


def _batch_starts(setting: Setting, checkpoint: Checkpoint, contract: Mapping[str, Any]) -> tuple[BatchStart, ...]:
    """Return where global batches of each size begin in a run that continues from a checkpoint.

    Another global batch begins where the checkpoint is, if the command line of a resumption has named it.

    Raises:
        ResumeError: the checkpoint has another contract.
    """
    saved_size = checkpoint.manifest.contract.get(_GLOBAL_BATCH)
    size = setting.context.spec.global_batch_size
    batch_starts = progress_of(checkpoint).batch_starts
    if isinstance(saved_size, int) and saved_size != size and _is_named(setting.context, size):
        refuse_another_contract(checkpoint, {**contract, _GLOBAL_BATCH: saved_size}, _CONTRACT_LABELS)
        if not batch_starts:
            batch_starts = (BatchStart(global_batch_size=saved_size),)
        steps = Steps(plan=replace(setting.plan.batch, global_batch_size=saved_size), start=batch_starts[-1])
        return (*batch_starts, steps.change(checkpoint.manifest.step, size))
    refuse_another_contract(checkpoint, contract, _CONTRACT_LABELS)
    return batch_starts


def _is_named(context: TrainContext, global_batch_size: int) -> bool:
    """Return whether the command line of a resumption has named this global batch."""
    submission = read_submission(context.run)
    if submission is None:
        return False
    return any(change.key == BATCH and change.after == global_batch_size for change in submission.changes)


def contract_of(spec: JobSpec, data: Data, seed: int) -> dict[str, Any]:
    """Return the settings that must be the same in every attempt of a run."""
    return {
        "version": CONTRACT_VERSION,
        "seed": seed,
        "samples": len(data.train),
        "unit": spec.batch.unit,
        "fingerprint": data.fingerprint,
        "global_batch_size": spec.global_batch_size,
        "tail": spec.batch.tail,
        "order": spec.batch.order,
    }


def _open_files(setting: Setting, replica: Replica, progress: TrainingProgress) -> MetricsFile:
    """Write the plan, the event and the start-up lines, and drop metrics that are later than the checkpoint."""
    context = setting.context
    raise_if_fenced(context.run, context.attempt)
    write_plan_record(context.run, {**setting.plan.as_json(), "total_steps": setting.schedule.total_steps})
    keep_until(context.run.metrics, progress.step, progress.evaluated_step)
    origin = "from a checkpoint" if progress.step else "from the beginning"
    if progress.batch_starts and progress.batch_starts[-1].step == progress.step:
        origin = f"{origin}, with {_start_text(progress.batch_starts[-1], setting.plan.batch.unit)}"
    append_event(
        context.run.events,
        kind="train",
        time=context.now(),
        attempt=context.attempt,
        step=progress.step,
        reason=origin,
    )
    for line in _start_up_lines(setting, replica, progress):
        context.print_on_rank_0(line)
    return context.metrics_file()


def _information(setting: Setting) -> dict[str, Any]:
    """Return facts about this attempt for its checkpoints; other attempts may differ in them."""
    batch = setting.plan.batch
    return {
        "world_size": batch.world_size,
        "grad_accum_steps": batch.grad_accum_steps,
        "max_per_device_batch_size": batch.max_per_device_batch_size,
        "device": setting.context.device.type,
        "threads": setting.context.threads,
        "precision": setting.context.train.precision,
        "versions": {"hpcddp": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
    }


def _start_up_lines(setting: Setting, replica: Replica, progress: TrainingProgress) -> Iterator[str]:
    """Yield what rank 0 says about the training before its first step, without line ends."""
    context = setting.context
    train = context.train
    data = setting.data
    yield (
        f"hpcddp: run {context.run.run_id}, attempt {context.attempt}: "
        f"{counted(context.world_size, 'rank')} on {context.device.type}, each with "
        f"{counted(context.threads, 'thread')} and {counted(setting.workers, 'loader worker')}; "
        f"seed {train.seed}"
    )
    yield (
        f"  model {train.model} ({count_parameters(replica.model):,} parameters), {train.precision}, "
        f"{train.optimizer.name}; data {data.name}: {len(data.train):,} training and {len(data.val):,} validation "
        f"samples, {data.classes} classes"
    )
    yield from plan_lines(setting.plan, setting.schedule.total_steps)
    if progress.batch_starts:
        yield f"  {_start_text(progress.batch_starts[-1], setting.plan.batch.unit)}"
    for note in notes_of(setting, replica):
        yield f"  note: {note}"
    if progress.step:
        yield f"  {_resumed_text(setting.schedule, progress)}"


def _resumed_text(schedule: Schedule, progress: TrainingProgress) -> str:
    _, steps = schedule.steps.place(progress.step)
    since = ""
    if progress.batch_starts and progress.epoch == schedule.steps.start.epoch:
        since = " with this batch"
    return (
        f"going on after step {progress.step} (epoch {progress.epoch}, {counted(steps, 'step')} into it{since}, "
        f"{progress.samples_seen:,} samples seen)"
    )


def _start_text(start: BatchStart, unit: Unit) -> str:
    return (
        f"batches of {start.global_batch_size} {unit}s from step {start.step + 1} on (epoch {start.epoch}, after "
        f"{start.offset_samples} of its {unit}s)"
    )


def parameters_sha256(model: nn.Module) -> str:
    """Return one digest of all parameters: name, number format, shape and bytes, in the model's order."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name}\n{parameter.dtype}\n{tuple(parameter.shape)}\n".encode())
        digest.update(tensor_bytes(parameter))
    return digest.hexdigest()


def _finish(context: TrainContext, replica: Replica, progress: TrainingProgress) -> None:
    """Write the result of a finished run, whole."""
    raise_if_fenced(context.run, context.attempt)
    # In the document numbers that are not finite are None.
    evaluation = progress.as_document()["evaluation"] or {}
    accuracy = evaluation.get("val_accuracy")
    ema_sha256 = None
    if replica.ema is not None:
        ema_sha256 = parameters_sha256(replica.ema.model)
    facts = {
        "epochs": progress.epoch,
        "final_loss": progress.last_loss,
        "val_top5": evaluation.get("val_top5"),
        "val_loss": evaluation.get("val_loss"),
        "val_samples": evaluation.get("val_samples"),
        "samples_seen": progress.samples_seen,
        "skipped_steps": progress.skipped_steps,
        "parameters_sha256": parameters_sha256(replica.model),
        "ema_sha256": ema_sha256,
        "threads": context.threads,
        "precision": context.train.precision,
        "device": torch.cuda.get_device_name(context.device) if context.device.type == "cuda" else "cpu",
        "versions": {"hpcddp": __version__, "torch": str(torch.__version__)},
    }
    result = Result(
        status=FINISHED,
        steps=progress.step,
        val_accuracy=accuracy,
        world_size=context.world_size,
        attempts=context.attempt + 1,
        wall_s=round(progress.wall_s, 3),
        facts=facts,
    )
    finish_run(context.run, result, attempt=context.attempt, step=progress.step, reason="all steps are done")
    accuracy_text = "" if accuracy is None else f", val_accuracy {accuracy:.4f}"
    context.print_on_rank_0(f"finished: {counted(progress.step, 'step')} in {progress.wall_s:.1f} s{accuracy_text}")
