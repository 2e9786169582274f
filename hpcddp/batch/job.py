"""The plan of a whole job: the batch, how long the training is, and the learning rate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hpcddp.batch.noise_scale import MeasuredNoise, larger_batch_pays, noise_note
from hpcddp.batch.notes import split_notes
from hpcddp.batch.numbers import per_device_batch_size
from hpcddp.batch.plan import BatchPlan, plan_batch
from hpcddp.batch.refusals import count, refuse_accumulated_global_loss, refuse_below_one
from hpcddp.batch.scaling import Scaling, scaling_of
from hpcddp.spec.job import JobSpec, LearningRate, Train

# Longer lists than this explain nothing to anyone; the rule gives each number.
_MOST_NUMBERS = 1_000_000
_LAWS = {"linear": "linear", "sqrt": "square-root"}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """A batch plan with the length of the training and its learning rate.

    Args:
        batch: who gets what.
        epochs: epochs of the training; None = unknown.
        learning_rate: the rate after the warm-up and before any decay, scaled by the rule; None = unknown.
        schedule: the job's ``learning_rate`` section, scaled by the rule; None without a job file.
        scaling: what the rule made of the constants; None where no base is known.
        noise: the gradient noise scale that was measured before; None = unknown, or the batch counts groups.
        notes: what a person should know beyond the numbers.
    """

    batch: BatchPlan
    epochs: int | None = None
    learning_rate: float | None = None
    schedule: LearningRate | None = None
    scaling: Scaling | None = None
    noise: MeasuredNoise | None = None
    notes: tuple[str, ...] = ()

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the whole training: S * epochs; None when either is unknown."""
        if self.batch.steps_per_epoch is None or self.epochs is None:
            return None
        return self.batch.steps_per_epoch * self.epochs

    @property
    def _larger_batch_pays(self) -> bool | None:
        return None if self.noise is None else larger_batch_pays(self.noise.samples, self.batch.global_batch_size)

    def as_json(self) -> dict[str, Any]:
        """Return the document of ``hpcddp plan --json``; what is not known is None, and a note says why."""
        batch, notes = self.batch, list(self.notes)
        listable = batch.world_size * batch.grad_accum_steps <= _MOST_NUMBERS
        if not listable:
            notes.append(
                "per_rank_samples and micro_batches are left out, being more than a million numbers: rank r gets "
                "floor(B/W) + (1 if r < B mod W else 0) samples, and micro-step a of its n likewise "
                "floor(n/A) + (1 if a < n mod A else 0)."
            )
        return {
            "global_batch_size": batch.global_batch_size,
            "world_size": batch.world_size,
            "grad_accum_steps": batch.grad_accum_steps,
            "per_rank_samples": list(batch.per_rank_samples) if listable else None,
            "micro_batches": [list(micro) for micro in batch.micro_batches] if listable else None,
            "steps_per_epoch": batch.steps_per_epoch,
            "tail_samples": batch.tail_samples,
            "samples_per_epoch": batch.samples_per_epoch,
            "duplicated": batch.duplicated,
            "dropped": batch.dropped,
            "imbalance": batch.imbalance,
            "learning_rate": self.learning_rate,
            **(Scaling.UNKNOWN if self.scaling is None else self.scaling.as_json()),
            "total_steps": self.total_steps,
            "unit": batch.unit,
            "noise_scale": None if self.noise is None else self.noise.samples,
            "larger_batch_pays": self._larger_batch_pays,
            "notes": notes,
        }


def plan_job(
    spec: JobSpec,
    *,
    samples: int | None,
    smallest_group: int | None = None,
    noise: MeasuredNoise | None = None,
    notes: Sequence[str] = (),
) -> JobPlan:
    """Return the plan of a job.

    Args:
        spec: the job.
        samples: N, samples of its training data, or groups with ``unit: group``; None = unknown.
        smallest_group: samples of the smallest group; None = unknown, or the unit is a sample.
        noise: the gradient noise scale that an earlier training measured; it says nothing of a batch of groups.
        notes: what is known already, for instance why ``samples`` is not; they come first.

    Raises:
        PlanError: the batch cannot be split as asked, or evenly for a command; the learning-rate rule does not hold;
            or a loss over the global batch would not see all of it at once.
    """
    batch = plan_batch(
        global_batch_size=spec.global_batch_size,
        world_size=spec.world_size,
        samples=samples,
        max_per_device_batch_size=spec.batch.max_per_device_batch_size,
        grad_accum_steps=spec.batch.grad_accum_steps,
        per_device_batch_size=spec.batch.per_device_batch_size,
        tail=spec.batch.tail,
        split=spec.batch.split,
        unit=spec.batch.unit,
        smallest_group=smallest_group,
    )
    if spec.command is not None:
        per_device_batch_size(batch)
    unknown = f"The number of {batch.unit}s is unknown; give it with --samples."
    train = spec.train
    if train is not None and train.loss_reduction == "global":
        refuse_accumulated_global_loss(batch.grad_accum_steps)
    scaling = scaling_of(
        spec.learning_rate,
        None if train is None else train.optimizer,
        ema_decay=None if train is None else train.ema_decay,
        global_batch_size=batch.global_batch_size,
    )
    return JobPlan(
        batch=batch,
        epochs=None if spec.train is None else spec.train.epochs,
        learning_rate=scaling.scaled.learning_rate,
        schedule=scaling.scaled.course(spec.learning_rate),
        scaling=scaling,
        noise=None if batch.unit == "group" else noise,
        notes=(
            *notes,
            *(() if samples is not None or notes else (unknown,)),
            *split_notes(batch, "local" if train is None else train.batch_norm),
            *_noise_notes(noise, batch, measures=train is not None and train.noise_scale),
            *_warm_up_notes(spec.learning_rate, train),
            *_scaling_notes(scaling, batch.global_batch_size),
        ),
    )


def plan_numbers(
    batch: BatchPlan,
    *,
    epochs: int | None,
    learning_rate: float | None,
    scaling: Scaling | None = None,
    noise: MeasuredNoise | None = None,
    notes: Sequence[str] = (),
) -> JobPlan:
    """Return the plan of numbers that come without a job file.

    Args:
        batch: the batch plan.
        epochs: epochs of the training; None = unknown.
        learning_rate: the rate after the warm-up; None = unknown.
        scaling: what a rule made of a base; None = no rule was given.
        noise: the gradient noise scale, as far as it was measured.
        notes: what is known already; they come first.

    Raises:
        PlanError: there is less than one epoch.
    """
    refuse_below_one(epochs=epochs)
    unknown = []
    if batch.samples is None:
        unknown.append(
            "steps_per_epoch and what follows from it are unknown: no number of samples was given (--samples)."
        )
    if epochs is None:
        unknown.append("total_steps is unknown: no number of epochs was given (--epochs).")
    if learning_rate is None:
        unknown.append("learning_rate is unknown: no base was given (--base-lr).")
    scaled = [] if scaling is None else list(_scaling_notes(scaling, batch.global_batch_size))
    return JobPlan(
        batch=batch,
        epochs=epochs,
        learning_rate=learning_rate,
        scaling=scaling,
        noise=noise,
        notes=(*notes, *unknown, *split_notes(batch), *_noise_notes(noise, batch, measures=False), *scaled),
    )


def _noise_notes(noise: MeasuredNoise | None, batch: BatchPlan, *, measures: bool) -> Iterator[str]:
    if batch.unit == "group":
        if noise is not None:
            yield "The gradient noise scale counts samples and this batch counts groups, so that it says nothing here."
        return
    note = noise_note(noise, global_batch_size=batch.global_batch_size, measures=measures)
    if note is not None:
        yield note


def _warm_up_notes(rate: LearningRate, train: Train | None) -> Iterator[str]:
    if train is not None and rate.warmup_epochs >= train.epochs:
        yield (
            f"learning_rate.warmup_epochs is {rate.warmup_epochs:g} and the training has "
            f"{count(train.epochs, 'epoch')}: the rate does nothing but rise."
        )


def _scaling_notes(scaling: Scaling, global_batch_size: int) -> Iterator[str]:
    rule, tuned = scaling.scaled.rule, scaling.tuned_for
    if rule != "none" and tuned is None:
        yield (
            f"learning_rate.rule is {rule}, and changes nothing: learning_rate.base_global_batch_size is null, so that "
            "base is for this job's own batch."
        )
    if rule == "none" and tuned not in (None, global_batch_size) and scaling.optimizer is not None:
        fitting = scaling.fitting
        would = (
            f"The rule that fits {scaling.optimizer} does not hold at this kappa, where kappa * (1 - beta) reaches 1"
            if fitting is None
            else f"The {_LAWS[fitting.rule]} rule would give {fitting.learning_rate:g}"
        )
        yield (
            f"learning_rate.base {scaling.base:g} was tuned for a global batch of {tuned}, and this one has "
            f"{global_batch_size}: rule 'none' leaves it. {would}; no rule fits every model (Shallue et al. 2019)."
        )
