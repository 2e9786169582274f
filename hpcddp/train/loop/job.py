"""The built-in training of one rank, from the choice of the checkpoint to ``result.json``."""

from __future__ import annotations

import gc
import hashlib
import platform
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from hpcddp.batch.noise_scale import larger_batch_pays
from hpcddp.batch.order import CONTRACT_VERSION
from hpcddp.batch.plan import BatchStart, Steps
from hpcddp.errors import counted
from hpcddp.jobfile.fields import Every
from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.sections import LearningRate, Unit
from hpcddp.run.checkpoints import Checkpoint
from hpcddp.run.events import EventKind, append_event
from hpcddp.run.job_records import read_submission
from hpcddp.run.metrics import keep_until
from hpcddp.run.metrics_file import MetricsFile
from hpcddp.run.ownership import BATCH, raise_if_fenced
from hpcddp.run.plan import write_plan_record
from hpcddp.run.result import FINISHED, Result, finish_run
from hpcddp.train.checkpoint.start import agree_on_start, refuse_another_contract
from hpcddp.train.context import TrainContext
from hpcddp.train.data.identity import tensor_bytes
from hpcddp.train.data.parts import Data
from hpcddp.train.data.workers import lost_worker
from hpcddp.train.errors import StoppedError
from hpcddp.train.loop.assembly import Setting, change_start, derive_setting, make_loop, make_replica, notes_of
from hpcddp.train.loop.schedule import Schedule
from hpcddp.train.loop.state import TrainingProgress, make_checkpointer, progress_of, restore
from hpcddp.train.model.models import count_parameters
from hpcddp.train.model.replica import Replica
from hpcddp.train.precision import Precision, set_up_backends
from hpcddp.train.tracking.opening import tracked
from hpcddp.version import __version__

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

    Returns when ``result.json`` is written and every rank has passed a barrier. A run that has finished before is not
    changed.

    Args:
        context: the job and this rank; the default process group is open.

    Raises:
        TrainingError: see its subclasses; after any exception no collective may be entered.
        NoCheckpointError: there should be a checkpoint, and none is valid.
        FencedError: another attempt owns the run.
        PlanError: the batch does not fit the data or the model.
    """
    found = agree_on_start(context.run, context.attempt, print_line=context.print_on_rank_0, check=progress_of)
    if found.finished:
        context.print_on_rank_0(f"run {context.run.run_id} has finished already; nothing to do")
        return
    try:
        _train(context, found.checkpoint)
    except StoppedError:
        # The launcher may end the other ranks as soon as one has exited, so all ranks leave together.
        dist.barrier()
        raise
    except RuntimeError as error:
        # torch reports a lost loader process by an exception at any place of the main thread.
        lost = lost_worker(error)
        if lost is None:
            raise
        raise lost from error
    # Freeing DDP after its process group is destroyed can deadlock, so it is freed before.
    gc.collect()
    dist.barrier()


def _train(context: TrainContext, checkpoint: Checkpoint | None) -> None:
    set_up_backends(Precision(context.train.precision, context.device.type), deterministic=context.train.deterministic)
    setting = derive_setting(context)
    contract = contract_of(context.spec, setting.data, context.train.seed)
    starts: tuple[BatchStart, ...] = ()
    if checkpoint is not None:
        # Before the model is built, which may fail because the job is another one.
        starts = _batch_starts(setting, checkpoint, contract)
    if starts:
        setting = change_start(setting, starts[-1])
    replica = make_replica(setting)
    checkpointer = make_checkpointer(context, replica, contract, _information(setting))
    progress = restore(checkpointer, checkpoint, context.attempt, replica, starts)
    metrics = _open_files(setting, replica, progress) if context.is_main else None
    with tracked(context, first_step=progress.step):
        try:
            progress = make_loop(setting, replica, checkpointer, metrics, progress).run()
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
    manifest, now = checkpoint.manifest, setting.context.spec.global_batch_size
    before, starts = manifest.contract.get(_GLOBAL_BATCH), progress_of(checkpoint).batch_starts
    if isinstance(before, int) and before != now and _is_named(setting.context, now):
        refuse_another_contract(checkpoint, {**contract, _GLOBAL_BATCH: before}, _CONTRACT_LABELS)
        starts = starts or (BatchStart(global_batch_size=before),)
        steps = Steps(plan=replace(setting.plan.batch, global_batch_size=before), start=starts[-1])
        return (*starts, steps.change(manifest.step, now))
    refuse_another_contract(checkpoint, contract, _CONTRACT_LABELS)
    return starts


def _is_named(context: TrainContext, global_batch_size: int) -> bool:
    """Return whether the command line of a resumption has named this global batch."""
    submission = read_submission(context.run)
    changes = () if submission is None else submission.changes
    return any(change.key == BATCH and change.after == global_batch_size for change in changes)


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
    begun = "from a checkpoint" if progress.step else "from the beginning"
    if progress.batch_starts and progress.batch_starts[-1].step == progress.step:
        begun += f", with {_start_text(progress.batch_starts[-1], setting.plan.batch.unit)}"
    _event(context, "train", progress.step, begun)
    facts = {
        "parameters": count_parameters(replica.model),
        "workers": setting.workers,
        "notes": notes_of(setting, replica),
    }
    for line in start_up_lines(context, setting.data, setting.schedule, progress, facts):
        context.print_on_rank_0(line)
    return context.metrics_file()


def _finish(context: TrainContext, replica: Replica, progress: TrainingProgress) -> None:
    raise_if_fenced(context.run, context.attempt)
    result = write_training_result(context, replica.models, progress)
    if progress.noise is not None:
        context.print_on_rank_0(progress.noise.advice(context.spec.global_batch_size))
    scored = "" if result["val_accuracy"] is None else f", val_accuracy {result['val_accuracy']:.4f}"
    context.print_on_rank_0(f"finished: {counted(progress.step, 'step')} in {progress.wall_s:.1f} s{scored}")


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


def _event(context: TrainContext, kind: EventKind, step: int, reason: str) -> None:
    append_event(context.run.events, kind=kind, time=context.now(), attempt=context.attempt, step=step, reason=reason)


def start_up_lines(
    context: TrainContext, data: Data, schedule: Schedule, progress: TrainingProgress, facts: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the lines, without line ends.

    Args:
        context: the job and this rank.
        data: the data set.
        schedule: the steps of the training.
        progress: how far the training is at its start.
        facts: ``parameters`` (a count), ``workers`` (of each rank), ``notes`` (a list of sentences).
    """
    train, plan, rate = context.train, schedule.plan, schedule.learning_rate
    yield (
        f"hpcddp: run {context.run.run_id}, attempt {context.attempt}: "
        f"{counted(context.world_size, 'rank')} on {context.device.type}, each with "
        f"{counted(context.threads, 'thread')} and {counted(facts['workers'], 'loader worker')}; "
        f"seed {train.seed}"
    )
    yield (
        f"  model {train.model} ({facts['parameters']:,} parameters), {train.precision}, {train.optimizer.name}; "
        f"data {data.name}: {len(data.train):,} training and {len(data.val):,} validation samples, "
        f"{data.classes} classes"
    )
    yield (
        f"  global batch {plan.global_batch_size} {plan.unit}s = per rank {_shares_text(plan.per_rank_samples)}, "
        f"in {counted(plan.grad_accum_steps, 'micro-step')} of at most {max(plan.micro_batches[0])}"
    )
    epochs, total = counted(schedule.epochs, "epoch"), counted(schedule.total_steps, "step")
    product = f"{epochs} x {counted(schedule.steps_per_epoch, 'step')} = {total}"
    if progress.batch_starts:
        product = (
            f"{epochs}, {total}, {schedule.steps_per_epoch} in an epoch of "
            f"{_start_text(progress.batch_starts[-1], plan.unit)}"
        )
    yield (
        f"  {product}; an epoch's "
        f"last batch has {plan.tail_samples} {plan.unit}s (tail {plan.tail}: {plan.duplicated} repeated, "
        f"{plan.dropped} left out)"
    )
    evaluated = "every epoch" if schedule.eval_every == 1 else f"every {schedule.eval_every} epochs"
    yield (
        f"  learning rate {rate.base:g}{_rule_text(context.spec.learning_rate)}, {rate.schedule}, warm-up "
        f"{rate.warmup_epochs:g} epoch{'' if rate.warmup_epochs == 1 else 's'}; evaluation {evaluated}; "
        f"checkpoint {_interval_text(schedule.every)}, "
        f"{context.spec.checkpoint.keep} kept"
    )
    yield from (f"  note: {note}" for note in facts["notes"])
    if progress.step:
        _, steps = schedule.steps.place(progress.step)
        since = " with this batch" if progress.epoch == schedule.steps.start.epoch and progress.batch_starts else ""
        yield (
            f"  going on after step {progress.step} (epoch {progress.epoch}, {counted(steps, 'step')} into it{since}, "
            f"{progress.samples_seen:,} samples seen)"
        )


def _start_text(start: BatchStart, unit: Unit) -> str:
    return (
        f"batches of {start.global_batch_size} {unit}s from step {start.step + 1} on (epoch {start.epoch}, after "
        f"{start.offset_samples} of its {unit}s)"
    )


def _rule_text(stated: LearningRate) -> str:
    if stated.rule == "none":
        return ""
    return f" ({stated.rule} from {stated.base:g} at a global batch of {stated.base_global_batch_size or 'the same'})"


def _shares_text(shares: tuple[int, ...]) -> str:
    """Return shares with equal neighbours counted: ``86 + 2 x 85``."""
    larger, smaller = shares[0], shares[-1]
    if larger == smaller:
        return f"{len(shares)} x {larger}"
    return f"{shares.count(larger)} x {larger} + {shares.count(smaller)} x {smaller}"


def _interval_text(every: Every) -> str:
    if every.steps is not None:
        return f"every {counted(every.steps, 'step')} and epoch"
    if every.epochs is not None:
        return f"every {counted(every.epochs, 'epoch')}"
    minutes = every.duration.total_seconds() / 60 if every.duration else 0
    return f"every {minutes:g} minutes and epoch"


def parameters_sha256(model: nn.Module) -> str:
    """Return one digest of all parameters: name, number format, shape and bytes, in the model's order."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name}\n{parameter.dtype}\n{tuple(parameter.shape)}\n".encode())
        digest.update(tensor_bytes(parameter))
    return digest.hexdigest()


def write_training_result(
    context: TrainContext, models: Mapping[str, nn.Module], progress: TrainingProgress
) -> dict[str, Any]:
    """Write the result of a finished run, whole, and return it.

    Args:
        context: the run and this attempt.
        models: ``model``, which was trained, and ``ema``, its averaged weights, where they are what was evaluated.
        progress: where the training ended.
    """
    evaluation = progress.as_document()["evaluation"] or {}
    noise, batch = None if progress.noise is None else progress.noise.samples, context.spec.global_batch_size
    facts = {
        "epochs": progress.epoch,
        "final_loss": progress.last_loss,
        "val_top5": evaluation.get("val_top5"),
        "val_loss": evaluation.get("val_loss"),
        "val_samples": evaluation.get("val_samples"),
        "samples_seen": progress.samples_seen,
        "skipped_steps": progress.skipped_steps,
        "parameters_sha256": parameters_sha256(models["model"]),
        "ema_sha256": parameters_sha256(models["ema"]) if "ema" in models else None,
        "noise_scale": noise,
        "larger_batch_pays": None if noise is None else larger_batch_pays(noise, batch),
        "threads": context.threads,
        "precision": context.train.precision,
        "device": _device_name(context.device),
        "versions": {"hpcddp": __version__, "torch": str(torch.__version__)},
    }
    result = Result(
        status=FINISHED,
        steps=progress.step,
        val_accuracy=evaluation.get("val_accuracy"),
        world_size=context.world_size,
        attempts=context.attempt + 1,
        wall_s=round(progress.wall_s, 3),
        facts=facts,
    )
    finish_run(context.run, result, attempt=context.attempt, step=progress.step, reason="all steps are done")
    return result.as_json()


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
