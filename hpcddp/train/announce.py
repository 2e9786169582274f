"""Start-up lines of a training in rank 0's log: every number that was derived from the job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hpcddp.jobfile.fields import Every
from hpcddp.jobfile.sections import LearningRate
from hpcddp.train.context import TrainContext
from hpcddp.train.data.images import Data
from hpcddp.train.progress import Progress
from hpcddp.train.schedule import Schedule


def start_up_lines(
    context: TrainContext, data: Data, schedule: Schedule, progress: Progress, facts: Mapping[str, Any]
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
        f"hpcddp: run {context.run.run_id}, attempt {context.attempt}: {context.world_size} ranks on "
        f"{context.device.type}, each with {context.threads} threads and {facts['workers']} loader workers; "
        f"seed {train.seed}"
    )
    yield (
        f"  model {train.model} ({facts['parameters']:,} parameters), {train.precision}, {train.optimizer.name}; "
        f"data {data.name}: {len(data.train):,} training and {len(data.val):,} validation samples, "
        f"{data.classes} classes"
    )
    yield (
        f"  global batch {plan.global_batch_size} {plan.unit}s = per rank {_shares_text(plan.per_rank_samples)}, "
        f"in {plan.grad_accum_steps} micro-steps of at most {max(plan.micro_batches[0])}"
    )
    yield (
        f"  {schedule.epochs} epochs x {schedule.steps_per_epoch} steps = {schedule.total_steps} steps; an epoch's "
        f"last batch has {plan.tail_samples} {plan.unit}s (tail {plan.tail}: {plan.duplicated} repeated, "
        f"{plan.dropped} left out)"
    )
    yield (
        f"  learning rate {rate.base:g}{_rule_text(context.spec.learning_rate)}, {rate.schedule}, warm-up "
        f"{rate.warmup_epochs:g} epochs; evaluation every "
        f"{schedule.eval_every} epochs; checkpoint {_interval_text(schedule.every)}, "
        f"{context.spec.checkpoint.keep} kept"
    )
    yield from (f"  note: {note}" for note in facts["notes"])
    if progress.step:
        yield (
            f"  going on after step {progress.step} (epoch {progress.epoch}, "
            f"{progress.step % schedule.steps_per_epoch} steps into it, {progress.samples_seen:,} samples seen)"
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
        return f"every {every.steps} steps and epoch"
    if every.epochs is not None:
        return f"every {every.epochs} epochs"
    minutes = every.duration.total_seconds() / 60 if every.duration else 0
    return f"every {minutes:g} minutes and epoch"
