"""The built-in training of one rank, from the choice of the checkpoint to ``result.json``."""

from __future__ import annotations

import gc
import platform
from typing import Any

import torch
import torch.distributed as dist

from hpcddp import __version__
from hpcddp.run.checkpoints import Checkpoint
from hpcddp.run.events import EventKind, append_event
from hpcddp.run.metrics import write_plan_record
from hpcddp.run.ownership import raise_if_fenced
from hpcddp.train.announce import start_up_lines
from hpcddp.train.assembly import Setting, derive_setting, make_loop, make_replica, notes_of
from hpcddp.train.checkpoint.restore import progress_of, restore
from hpcddp.train.checkpoint.save import Saver
from hpcddp.train.checkpoint.start import agree_on_start
from hpcddp.train.context import TrainContext
from hpcddp.train.contract import contract_of, refuse_another_contract
from hpcddp.train.data.workers import lost_worker
from hpcddp.train.errors import StoppedError
from hpcddp.train.metrics import MetricsFile, keep_until
from hpcddp.train.models import count_parameters
from hpcddp.train.precision import Precision, set_up_backends
from hpcddp.train.progress import Progress
from hpcddp.train.replica import Replica
from hpcddp.train.result import write_training_result
from hpcddp.train.tracking.opening import tracked

__all__ = ["TrainContext", "run_training"]


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
    found = agree_on_start(context.run, context.attempt, tell=context.tell, check=progress_of)
    if found.finished:
        context.tell(f"run {context.run.run_id} has finished already; nothing to do")
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
    if checkpoint is not None:
        refuse_another_contract(checkpoint, contract)
    replica = make_replica(setting)
    progress = Progress() if checkpoint is None else restore(checkpoint, replica)
    metrics = _open_files(setting, replica, progress) if context.is_main else None
    saver = Saver(context, contract, _information(setting))
    with tracked(context, first_step=progress.step):
        try:
            progress = make_loop(setting, replica, saver, metrics, progress).run()
        finally:
            saver.abandon()
        if context.is_main:
            _finish(context, replica, progress)


def _open_files(setting: Setting, replica: Replica, progress: Progress) -> MetricsFile:
    """Write the plan, the event and the start-up lines, and drop metrics that are later than the checkpoint."""
    context = setting.context
    raise_if_fenced(context.run, context.attempt)
    write_plan_record(context.run, setting.plan.as_json())
    keep_until(context.run.metrics, progress.step, progress.evaluated_step)
    _event(context, "train", progress.step, "from a checkpoint" if progress.step else "from the beginning")
    facts = {
        "parameters": count_parameters(replica.model),
        "workers": setting.workers,
        "notes": notes_of(setting, replica),
    }
    for line in start_up_lines(context, setting.data, setting.schedule, progress, facts):
        context.tell(line)
    return MetricsFile(
        context.run.metrics,
        monotonic=context.monotonic,
        before_write=lambda: raise_if_fenced(context.run, context.attempt),
        warn=context.tell,
    )


def _finish(context: TrainContext, replica: Replica, progress: Progress) -> None:
    raise_if_fenced(context.run, context.attempt)
    result = write_training_result(context, replica.models, progress)
    _event(context, "finish", progress.step, "all steps are done")
    if progress.noise is not None:
        context.tell(progress.noise.advice(context.spec.global_batch_size))
    context.tell(f"finished: {progress.step} steps in {progress.wall_s:.1f} s, val_accuracy {result['val_accuracy']}")


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
