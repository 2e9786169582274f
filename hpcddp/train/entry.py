"""Run the user's function ``entrypoint: pkg.module:function`` as the work of a run."""

from __future__ import annotations

import gc
import inspect
import json
import logging
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from hpcddp.batch.job import JobPlan, plan_job
from hpcddp.jobfile.job import JobSpec
from hpcddp.run.events import append_event
from hpcddp.run.metrics_log import MetricsFile, plain_numbers
from hpcddp.run.ownership import raise_if_fenced
from hpcddp.run.result import FINISHED, Result, finish_run
from hpcddp.slurm.rank_env import RankEnv
from hpcddp.train.checkpoint.checkpointer import Checkpointer, Stateful
from hpcddp.train.context import TrainContext
from hpcddp.train.errors import UserCodeError
from hpcddp.train.stopper import RunStopper
from hpcddp.train.tracking.opening import Tracking
from hpcddp.train.user_code import load_function

_NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The argument of an ``entrypoint``, on every rank.

    Args:
        rank_env: this rank: ``rank``, ``local_rank``, ``world_size``, ``node_rank``, ``hosts`` and more.
        process_group: the default process group, open: NCCL on GPUs, gloo on CPUs.
        device: the device of this rank.
        plan: the batch plan; None if the job states no global batch.
        spec: the whole job file.
        run_dir: the run's directory, the same over all attempts.
        attempt: the number of this attempt; 0 is the first.
        stopper: tells after every step whether to stop; see ``hpcddp.Stopper``.
        logger: writes to this rank's log; every line states the rank.
    """

    rank_env: RankEnv
    process_group: dist.ProcessGroup
    device: torch.device
    plan: JobPlan | None
    spec: JobSpec
    run_dir: Path
    attempt: int
    stopper: RunStopper
    logger: logging.Logger
    _metrics: MetricsFile | None = field(repr=False)

    @property
    def rank(self) -> int:
        """0..world_size-1."""
        return self.rank_env.rank

    @property
    def world_size(self) -> int:
        """Ranks in the job."""
        return self.rank_env.world_size

    def checkpointer(self, objects: Mapping[str, Stateful], *, contract: Mapping[str, Any] = _NOTHING) -> Checkpointer:
        """Return the checkpointer of this run; ``hpcddp checkpoints`` lists what it saves.

        Args:
            objects: what to save, by name: anything with ``state_dict`` and ``load_state_dict``.
            contract: what must be the same when the run is resumed, besides the global batch.

        Raises:
            CheckpointerError: a name cannot be used.
        """
        batch = self.spec.batch
        stated = {"global batch": batch.global_batch_size, "tail": batch.tail, "order": batch.order, **contract}
        saved = self.spec.checkpoint
        checkpointer = Checkpointer(
            self.run_dir,
            objects,
            keep=saved.keep,
            best=saved.best,
            contract=stated,
        )
        # How long its saves take decides how early the stopper stops.
        self.stopper.checkpointer = checkpointer
        return checkpointer

    def log(self, step: int, **numbers: float) -> None:
        """Add a line to ``metrics.jsonl``, as ``hpcddp.log`` does; on rank 0; other ranks do nothing.

        Args:
            step: optimizer steps done.
            numbers: by name, such as ``loss``, ``lr``, ``samples_per_s``. Reading a number from a GPU makes the loop
                wait for it, so do not log one after every step.

        Raises:
            TypeError: one of them is not a number.
        """
        if self._metrics is not None:
            self._metrics.add({"step": int(step), **plain_numbers(numbers), "time": time.time()})


def run_entrypoint(context: TrainContext) -> None:
    """Call the job's ``entrypoint`` on this rank; the run has finished when it returns on all ranks.

    The value that it returns on rank 0 is written to ``result.json`` as ``returned``, if it can be written as JSON.

    Args:
        context: the job and this rank; the default process group is open.

    Raises:
        UserCodeError: there is no such function.
        PlanError: the batch cannot be split as asked.
        Exception: whatever the function raises.
    """
    name = context.spec.entrypoint
    if name is None:
        raise UserCodeError("the job has no entrypoint; write entrypoint: pkg.module:function")
    began = context.monotonic()
    function = load_function("entrypoint", name)
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        # Calling it would run none of its code, and the run would count as finished.
        raise UserCodeError(
            f"entrypoint is {name}, which is an async function or a generator, and calling it runs nothing of it; "
            "write a plain function"
        )
    metrics = None
    if context.is_main:
        # At once, as ``hpcddp.log`` does: the function may use both.
        metrics = context.metrics_file(open_s=0.0)
        append_event(context.run.events, kind="train", time=context.now(), attempt=context.attempt, reason=name)
    with context.tracking(first_step=None) as tracking:
        returned = function(_context_for(context, metrics, tracking))
        # Freeing DDP after its process group is destroyed can deadlock, so it is freed before.
        gc.collect()
        dist.barrier()
        if metrics is not None:
            metrics.flush()
            _finish(context, returned, wall_s=context.monotonic() - began)
    dist.barrier()


def _context_for(context: TrainContext, metrics: MetricsFile | None, tracking: Tracking) -> Context:
    spec = context.spec
    return Context(
        rank_env=context.rank_env,
        process_group=cast("dist.ProcessGroup", dist.group.WORLD),
        device=context.device,
        plan=None if spec.batch.global_batch_size is None else plan_job(spec, samples=None),
        spec=spec,
        run_dir=context.run.path,
        attempt=context.attempt,
        stopper=RunStopper(context, metrics=metrics, tracking=tracking),
        logger=_logger(context.rank),
        _metrics=metrics,
    )


def _logger(rank: int) -> logging.Logger:
    logger = logging.getLogger("hpcddp.entrypoint")
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter(f"%(asctime)s rank {rank} %(levelname)s %(message)s"))
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
    return logger


def _finish(context: TrainContext, returned: object, *, wall_s: float) -> None:
    raise_if_fenced(context.run, context.attempt)
    result = Result(
        status=FINISHED,
        attempts=context.attempt + 1,
        world_size=context.world_size,
        wall_s=round(wall_s, 3),
        facts={"returned": _as_json(returned, context)},
    )
    finish_run(context.run, result, attempt=context.attempt)


def _as_json(returned: object, context: TrainContext) -> object:
    try:
        document: object = json.loads(json.dumps(returned, allow_nan=False))
    except (TypeError, ValueError) as error:
        context.print_on_rank_0(f"warning: what the entrypoint returned is not kept in result.json: {error}")
        return None
    return document
