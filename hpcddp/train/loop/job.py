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

from hpcddp.batch.explain import plan_lines
from hpcddp.batch.order import CONTRACT_VERSION
from hpcddp.batch.plan import BatchStart, Steps
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
from hpcddp.train.checkpoint.start import agree_on_start, refuse_another_contract
from hpcddp.train.context import TrainContext
from hpcddp.train.data.opening import tensor_bytes
from hpcddp.train.data.parts import Data
from hpcddp.train.data.workers import lost_worker
from hpcddp.train.errors import StoppedError
from hpcddp.train.loop.assembly import Setting, change_start, derive_setting, make_loop, make_replica, notes_of
from hpcddp.train.loop.schedule import Schedule
from hpcddp.train.loop.state import TrainingProgress, make_checkpointer, progress_of, restore
from hpcddp.train.model.models import count_parameters
from hpcddp.train.model.replica import Replica
from hpcddp.train.precision import Precision, set_up_backends
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
