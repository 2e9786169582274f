"""The plan as a person reads it: who gets what, per step and per epoch, at which learning rate, and why."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from hpcddp.batch.job import JobPlan
from hpcddp.batch.plan import BatchPlan
from hpcddp.batch.refusals import count
from hpcddp.batch.split import runs

_WIDTH = 100
_LABEL = 17
# Up to here the micro-batches of a rank are written out one by one.
_MOST_TERMS = 6
_SMALLEST_SHOWN = 1e-4

_WHY = (
    "The world size does not enter: the gradient of a step is the mean over the samples of its global batch, each with "
    "the same weight, however many ranks share them. Other ranks move the split and the speed; the global batches, the "
    "steps and the learning rate stay."
)


def explain(plan: JobPlan) -> str:
    """Return the text of ``hpcddp plan``, lines of about 100 columns."""
    sections = [
        ("Step", list(_step(plan.batch))),
        ("Epoch", list(_epoch(plan.batch))),
        ("Training", list(_training(plan))),
    ]
    lines = []
    for title, rows in sections:
        lines += [title, *(f"  {label:{_LABEL}}{text}" for label, text in rows), ""]
    lines += textwrap.wrap(_WHY, _WIDTH)
    if plan.notes:
        lines += ["", "Notes"]
    for note in plan.notes:
        lines += textwrap.wrap(note, _WIDTH, initial_indent="  - ", subsequent_indent="    ", break_on_hyphens=False)
    return "\n".join(lines) + "\n"


def _step(batch: BatchPlan) -> Iterator[tuple[str, str]]:
    yield "global batch", f"{batch.global_batch_size:,} samples, over {count(batch.world_size, 'rank')}"
    yield from _shares(batch, batch.global_batch_size)
    cap = batch.max_per_device_batch_size
    limit = "no limit per device" if cap is None else f"at most {count(cap, 'sample')} per device at once"
    yield "accumulation", f"{count(batch.grad_accum_steps, 'micro-step')} per optimizer step; {limit}"
    if batch.imbalance:
        largest, smallest = (size for _, size in runs(batch.global_batch_size, batch.world_size))
        yield (
            "imbalance",
            (
                f"{_percent(batch.imbalance)}: ranks with {smallest:,} samples wait for those with {largest:,}; "
                "each sample weighs the same"
            ),
        )
    else:
        yield "imbalance", "none: every rank has the same number of samples"


def _epoch(batch: BatchPlan) -> Iterator[tuple[str, str]]:
    steps, tail = batch.steps_per_epoch, batch.tail_samples
    if batch.samples is None or steps is None or tail is None:
        yield "training data", "unknown number of samples"
        return
    yield "training data", f"{batch.samples:,} samples"
    if tail == batch.global_batch_size:
        yield "steps", f"{steps:,} of {tail:,} samples"
    elif steps == 1:
        yield "steps", f"1 of {count(tail, 'sample')}"
    else:
        yield "steps", f"{steps:,}: {steps - 1:,} of {batch.global_batch_size:,} samples, then one of {tail:,}"
    if tail != batch.global_batch_size:
        yield "last step", f"{count(tail, 'sample')}"
        yield from _shares(batch, tail)
    yield f"tail {batch.tail}", _coverage(batch)


def _coverage(batch: BatchPlan) -> str:
    if batch.duplicated:
        return f"every sample, and {batch.duplicated:,} repeated from the beginning of the order"
    if batch.dropped:
        return f"every sample once, but for {batch.dropped:,} that are left out, other ones each epoch"
    return "every sample exactly once"


def _shares(batch: BatchPlan, samples: int) -> Iterator[tuple[str, str]]:
    """Yield a row for the ranks that get the same: who, how many samples, in which micro-batches."""
    first = 0
    for ranks, share in runs(samples, batch.world_size):
        last = first + ranks - 1
        who = f"rank {first}" if ranks == 1 else f"ranks {first}-{last}"
        yield f"  {who}", _terms(share, batch.grad_accum_steps)
        first = last + 1


def _terms(share: int, steps: int) -> str:
    if steps == 1 or share == 0:
        return f"{count(share, 'sample')}"
    if steps <= _MOST_TERMS:
        terms = [str(size) for many, size in runs(share, steps) for _ in range(many)]
    else:
        terms = [f"{many} x {size}" for many, size in runs(share, steps)]
    return f"{count(share, 'sample')} = {' + '.join(terms)}"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.3g} %" if fraction >= _SMALLEST_SHOWN else "less than 0.01 %"


def _training(plan: JobPlan) -> Iterator[tuple[str, str]]:
    epochs = "an unknown number of epochs" if plan.epochs is None else count(plan.epochs, "epoch")
    yield "length", epochs if plan.total_steps is None else f"{count(plan.total_steps, 'step')} in {epochs}"
    if plan.learning_rate is None:
        yield "learning rate", "unknown"
        return
    yield "learning rate", f"{plan.learning_rate:g}{_course(plan)}"


def _course(plan: JobPlan) -> str:
    """Return how the rate goes: the warm-up, then the schedule."""
    schedule = plan.schedule
    if schedule is None:
        return ""
    parts = []
    if schedule.warmup_epochs:
        steps = plan.batch.steps_per_epoch
        in_steps = "" if steps is None else f" ({schedule.warmup_epochs * steps:,.10g} steps)"
        parts.append(f"after a linear warm-up of {schedule.warmup_epochs:g} epochs{in_steps}")
    if schedule.schedule == "cosine":
        parts.append(f"falling on a cosine to {schedule.min:g}")
    elif schedule.schedule == "step":
        milestones = ", ".join(f"{milestone:g}" for milestone in schedule.milestones)
        parts.append(f"times {schedule.gamma:g} at the beginning of epochs {milestones or '(none)'}")
    else:
        parts.append("constant")
    return ", " + ", then ".join(parts)
