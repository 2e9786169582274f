"""One rank's training, from finding out where the run stands to ``result.json``."""

from __future__ import annotations

import gc
import platform
from typing import Any

import torch
import torch.distributed as dist

from hpcddp import __version__
from hpcddp.run.checkpoints import Checkpoint
from hpcddp.run.events import EventKind, append_event
from hpcddp.run.files import write_json
from hpcddp.run.lease import raise_if_fenced
from hpcddp.train.announce import start_up_lines
from hpcddp.train.assembly import Setting, make_loop, make_replica, notes_of, settle
from hpcddp.train.context import TrainContext
from hpcddp.train.contract import contract_of, refuse_another_contract
from hpcddp.train.data.workers import lost_worker
from hpcddp.train.errors import StoppedError
from hpcddp.train.metrics import MetricsFile, keep_until
from hpcddp.train.models import count_parameters
from hpcddp.train.precision import Precision, set_up_backends
from hpcddp.train.progress import Progress
from hpcddp.train.replica import Replica
from hpcddp.train.restoring import restore
from hpcddp.train.result import write_result
from hpcddp.train.saving import Saver
from hpcddp.train.starting import agree_on_start

__all__ = ["TrainContext", "run_training"]


def run_training(context: TrainContext) -> None:
    """Train the job's model to the end, from the newest valid checkpoint if there is one.

    Returns when the run has finished: ``result.json`` is written and every rank has passed a barrier. A run that had
    finished before is not touched.

    Args:
        context: the job and this rank; the default process group is open.

    Raises:
        TrainingError: see its subclasses; after any exception no collective may be entered.
        NoCheckpointError: there should be a checkpoint, and none is valid.
        FencedError: another attempt owns the run.
        PlanError: the batch does not fit the data or the model.
    """
    found = agree_on_start(context.run, context.attempt, tell=context.tell)
    if found.finished:
        context.tell(f"run {context.run.run_id} has finished already; nothing to do")
        return
    try:
        _train(context, found.checkpoint)
    except StoppedError:
        # All ranks come here together, and whoever starts them ends the others when the first has gone.
        dist.barrier()
        raise
    except RuntimeError as error:
        # torch tells it by an exception in whatever the main thread does at that moment.
        lost = lost_worker(error)
        if lost is None:
            raise
        raise lost from error
    # Freeing DDP after its process group has gone can deadlock, so all of it goes first.
    gc.collect()
    dist.barrier()


def _train(context: TrainContext, checkpoint: Checkpoint | None) -> None:
    set_up_backends(Precision(context.train.precision, context.device.type), deterministic=context.train.deterministic)
    setting = settle(context)
    contract = contract_of(context.spec, setting.data, context.train.seed)
    if checkpoint is not None:
        refuse_another_contract(checkpoint, contract)
    replica = make_replica(setting)
    progress = Progress() if checkpoint is None else restore(checkpoint, replica)
    metrics = _open_files(setting, replica, progress) if context.is_main else None
    saver = Saver(context, contract, _information(setting))
    try:
        progress = make_loop(setting, replica, saver, metrics, progress).run()
    finally:
        saver.abandon()
    if context.is_main:
        _finish(context, replica, progress)


def _open_files(setting: Setting, replica: Replica, progress: Progress) -> MetricsFile:
    """Write the plan, tell people and the event log what begins, and make the metrics agree with the checkpoint."""
    context = setting.context
    raise_if_fenced(context.run, context.attempt)
    write_json(context.run.plan, setting.plan.as_json())
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
    result = write_result(context, replica.models, progress)
    _event(context, "finish", progress.step, "all steps are done")
    if progress.noise is not None:
        context.tell(progress.noise.advice(context.spec.global_batch_size))
    context.tell(f"finished: {progress.step} steps in {progress.wall_s:.1f} s, val_accuracy {result['val_accuracy']}")


def _information(setting: Setting) -> dict[str, Any]:
    """Return what a checkpoint says about the attempt that wrote it; a later one may differ."""
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
