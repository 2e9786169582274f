"""The text of ``hpcddp plan``: shares, steps, epochs, learning rate and notes."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby

from hpcddp.batch.job import JobPlan
from hpcddp.batch.plan import BatchPlan
from hpcddp.batch.scaling import ScaledRule, Scaling
from hpcddp.errors import counted

_WIDTH = 100
_LABEL = 17

_WHY = (
    (
        "The world size does not matter, except for BatchNorm that is local to a rank: the gradient of a step is the "
        "mean over the samples of its global batch, each with the same weight, however many ranks share them. Another "
        "number of ranks changes the split and the speed, and neither the global batches, nor the steps, nor the "
        "learning rate."
    ),
    (
        "Another global batch does matter, through kappa, and no rule is universal: which one holds, and up to which "
        "batch, differs between models, data and optimizers (Shallue et al. 2019). Compare a few rates at the new "
        "batch."
    ),
)


def explain(plan: JobPlan) -> str:
    """Return the text of ``hpcddp plan``, lines of about 100 columns."""
    blocks = [
        ["Step", *_row_lines(_step(plan.batch))],
        ["Epoch", *_row_lines(_epoch(plan.batch))],
        ["Training", *_row_lines(chain([_length(plan, plan.total_steps)], _rate(plan)))],
    ]
    blocks += [textwrap.wrap(paragraph, _WIDTH) for paragraph in _WHY]
    if plan.notes:
        blocks.append(["Notes", *_note_lines(plan.notes)])
    return "\n\n".join("\n".join(lines) for lines in blocks) + "\n"


def plan_lines(plan: JobPlan, total_steps: int) -> list[str]:
    """Return the rows about the step, the epoch and the training, for the log of a run.

    Args:
        total_steps: optimizer steps of the whole run, whose global batch a resumption may have changed.
    """
    return _row_lines(chain(_step(plan.batch), _epoch(plan.batch), [_length(plan, total_steps)], _rate(plan)))


def _row_lines(rows: Iterator[tuple[str, str]]) -> list[str]:
    return [f"  {label:{_LABEL}}{text}" for label, text in rows]


def _note_lines(notes: Sequence[str]) -> list[str]:
    lines = []
    for note in notes:
        lines += textwrap.wrap(note, _WIDTH, initial_indent="  - ", subsequent_indent="    ", break_on_hyphens=False)
    return lines


def explain_range(plans: Mapping[int, JobPlan]) -> str:
    """Return the rows about a range of nodes: what differs between the numbers, and what does not.

    Args:
        plans: the plans by the number of nodes, in ascending order.
    """
    rows = []
    for nodes, plan in plans.items():
        batch = plan.batch
        shares = [
            f"{counted(ranks, 'rank')} x {_terms(batch, share)}" for share, ranks in _runs(batch.per_rank_samples)
        ]
        rows.append(f"  {counted(nodes, 'node'):{_LABEL}}{', '.join(shares)}")
    same = (
        "The global batches, the steps and the learning rate are the same with each number. What follows is the plan "
        f"of {counted(max(plans), 'node')}."
    )
    return "\n".join(["Nodes", *rows, "", *textwrap.wrap(same, _WIDTH), ""])


def _step(batch: BatchPlan) -> Iterator[tuple[str, str]]:
    yield "global batch", f"{batch.global_batch_size:,} {batch.unit}s, over {counted(batch.world_size, 'rank')}"
    yield from _shares(batch, batch.global_batch_size)
    if batch.per_device_batch_size is not None:
        limit = f"{counted(batch.per_device_batch_size, batch.unit)} per device, held fixed"
    elif batch.max_per_device_batch_size is not None:
        limit = f"at most {counted(batch.max_per_device_batch_size, batch.unit)} per device at once"
    else:
        limit = "no limit per device"
    yield "accumulation", f"{counted(batch.grad_accum_steps, 'micro-step')} per optimizer step; {limit}"
    if batch.imbalance:
        largest = batch.per_rank_samples[0]
        smallest = batch.per_rank_samples[-1]
        waits = f"ranks with {smallest:,} {batch.unit}s wait for those with {largest:,}; each sample weighs the same"
        yield "imbalance", f"{100 * batch.imbalance:.3g} %: {waits}"
    else:
        yield "imbalance", f"none: every rank has the same number of {batch.unit}s"


def _epoch(batch: BatchPlan) -> Iterator[tuple[str, str]]:
    steps = batch.steps_per_epoch
    tail = batch.tail_samples
    if batch.samples is None or steps is None or tail is None:
        yield "training data", f"unknown number of {batch.unit}s"
        return
    yield "training data", f"{counted(batch.samples, batch.unit)}"
    if steps == 1 or tail == batch.global_batch_size:
        yield "steps", f"{steps:,} of {counted(tail, batch.unit)}"
    else:
        most = f"{steps - 1:,} of {counted(batch.global_batch_size, batch.unit)}"
        yield "steps", f"{steps:,}: {most}, then one of {tail:,}"
    if tail != batch.global_batch_size:
        yield "last step", counted(tail, batch.unit)
        yield from _shares(batch, tail)
    yield f"tail {batch.tail}", _coverage(batch)


def _coverage(batch: BatchPlan) -> str:
    if batch.duplicated:
        return f"every {batch.unit}, and {batch.duplicated:,} repeated from the beginning of the order"
    if batch.dropped:
        return f"every {batch.unit} once, except {batch.dropped:,} that are left out, others each epoch"
    return f"every {batch.unit} exactly once"


def _shares(batch: BatchPlan, samples: int) -> Iterator[tuple[str, str]]:
    """Yield a row for consecutive ranks with equal shares: ranks, samples, micro-batches."""
    first = 0
    for share, ranks in _runs(batch.shares(samples)):
        last = first + ranks - 1
        who = f"rank {first}" if ranks == 1 else f"ranks {first}-{last}"
        yield f"  {who}", _terms(batch, share)
        first = last + 1


def _terms(batch: BatchPlan, share: int) -> str:
    if batch.grad_accum_steps == 1 or share == 0:
        return counted(share, batch.unit)
    terms = [f"{many} x {size}" for size, many in _runs(batch.micro_batches_of(share))]
    return f"{counted(share, batch.unit)} = {' + '.join(terms)}"


def _runs(sizes: Iterable[int]) -> list[tuple[int, int]]:
    """Return the sizes with equal neighbours counted: (size, how many)."""
    return [(size, len(list(equal))) for size, equal in groupby(sizes)]


def _length(plan: JobPlan, total_steps: int | None) -> tuple[str, str]:
    length = "an unknown number of epochs"
    if plan.epochs is not None:
        length = counted(plan.epochs, "epoch")
    if total_steps is not None:
        length = f"{counted(total_steps, 'step')} in {length}"
    return "length", length


def _rate(plan: JobPlan) -> Iterator[tuple[str, str]]:
    if plan.learning_rate is None:
        yield "learning rate", "unknown"
        return
    if plan.scaling is not None:
        yield from _rules(plan.scaling, plan.batch.global_batch_size)
    yield "learning rate", f"{plan.learning_rate:g}{_schedule_text(plan)}"


def _rules(scaling: Scaling, global_batch_size: int) -> Iterator[tuple[str, str]]:
    """Yield kappa, and the constants by the chosen rule and by the rule for the optimizer."""
    scaled = scaling.scaled
    tuned = scaling.tuned_for
    if tuned is None:
        yield "kappa", "1: no other batch is named that the base rate was tuned for"
    else:
        yield (
            "kappa",
            f"{scaled.kappa:g} = {global_batch_size:,} / {tuned:,}, the batch that the base rate was tuned for",
        )
    yield f"rule {scaled.rule}", _constants(scaled)
    if scaling.fitting is not None and scaling.fitting.rule == scaled.rule:
        yield "fitting rule", f"{scaled.rule} is the one for {scaling.optimizer}"
    elif scaling.fitting is not None:
        yield "fitting rule", f"{scaling.fitting.rule}, for {scaling.optimizer}: {_constants(scaling.fitting)}"


def _constants(scaled: ScaledRule) -> str:
    parts = [f"learning rate {scaled.learning_rate:g}"]
    if scaled.betas is not None:
        parts.append(f"betas {scaled.betas[0]:.6g} and {scaled.betas[1]:.6g}, eps {scaled.eps:g}")
    if scaled.ema_decay is not None:
        parts.append(f"EMA decay {scaled.ema_decay:.6g}")
    return ", ".join(parts)


def _schedule_text(plan: JobPlan) -> str:
    """Return the warm-up and the schedule in words."""
    schedule = plan.schedule
    if schedule is None:
        return ""
    warm_up = ""
    if schedule.warmup_epochs:
        warm_up = f", after a linear warm-up (epochs: {schedule.warmup_epochs:g})"
    match schedule.schedule:
        case "cosine":
            return f"{warm_up}, falling on a cosine to {schedule.min:g}"
        case "step":
            milestones = ", ".join(f"{milestone:g}" for milestone in schedule.milestones)
            return f"{warm_up}, times {schedule.gamma:g} at the beginning of epochs {milestones or '(none)'}"
        case _:
            return f"{warm_up}, constant"
