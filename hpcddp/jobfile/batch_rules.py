"""Rules between the numbers of the batch and of the learning rate; the batch plan checks them too."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Final

from hpcddp.errors import counted
from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.sections import LearningRate, Optimizer, Unit

ADAM_FAMILY: Final = frozenset({"adamw"})
"""Optimizers that normalise the gradient, so that their steps do not grow with it."""


def batch_ratio(rate: LearningRate, global_batch_size: int) -> Fraction:
    """Return kappa = B / B0, B0 the batch that ``base`` was tuned for; 1 where the job file does not say which."""
    return Fraction(global_batch_size, rate.base_global_batch_size or global_batch_size)


def as_written(number: float) -> Fraction:
    """Return the exact value of the shortest decimal that reads back as this float."""
    return Fraction(repr(number))


def ratio_text(ratio: Fraction) -> str:
    """Return a whole number as it is, and any other ratio in six digits."""
    return str(ratio) if ratio.denominator == 1 else f"{float(ratio):.6g}"


def scaling_findings(
    rate: LearningRate, optimizer: Optimizer | None, global_batch_size: int
) -> Iterator[tuple[str, str]]:
    """Yield the reason why ``learning_rate.rule`` cannot be applied, if there is one: the key and the message.

    Args:
        optimizer: the job's ``train.optimizer``; None = unknown.
        global_batch_size: B.
    """
    if optimizer is None or optimizer.name not in ADAM_FAMILY:
        return
    if rate.rule == "linear":
        sentence = (
            f"is linear, and the steps of {optimizer.name} do not grow with the gradient, so that their rate follows "
            "the square root of the batch (Malladi et al. 2022); write sqrt, or none"
        )
        yield "learning_rate.rule", sentence
        return
    base = rate.base_global_batch_size
    if rate.rule != "sqrt" or base is None or base == global_batch_size:
        return
    kappa = batch_ratio(rate, global_batch_size)
    beta = min(optimizer.betas)
    growth = kappa * (1 - as_written(beta))
    if growth < 1:
        return
    way_out = "write betas closer to 1, or rule: none"
    # The largest B below B0 / (1 - beta).
    largest = math.ceil(base / (1 - as_written(beta))) - 1
    if largest >= 1:
        way_out = f"write batch.global_batch_size {largest} or less, betas closer to 1, or rule: none"
    sentence = (
        f"is sqrt, and kappa * (1 - beta) is {ratio_text(kappa)} * (1 - {beta!r}) = {ratio_text(growth)} for "
        f"train.optimizer.betas {list(optimizer.betas)}, which must be below 1, or nothing is averaged over steps; "
        f"{way_out}"
    )
    yield "learning_rate.rule", sentence


def fixed_way_out(global_batch_size: int, world_size: int, size: int) -> str:
    """Return the numbers next to B that ``W * n`` divides, in words; ``size`` is n, the fixed micro-batch."""
    together = world_size * size
    below = global_batch_size // together * together
    batches = [str(batch) for batch in (below, below + together) if batch]
    return f"global_batch_size {' or '.join(batches)}"


def why_ranks_idle(global_batch_size: int, world_size: int, unit: Unit, *, layout: str = "") -> str | None:
    """Return why B < W is refused, in words that follow the name of B; None for B >= W.

    Args:
        global_batch_size: B.
        world_size: W.
        layout: where W comes from, such as " (2 x 4)".
    """
    if global_batch_size >= world_size:
        return None
    return (
        f"is {global_batch_size}, fewer {unit}s than the {world_size} ranks{layout} that share them; write "
        f"{world_size} or more, or ask for at most {counted(global_batch_size, 'rank')}"
    )


def batch_reaches_every_rank(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Reject B < W."""
    if spec.batch.global_batch_size is None:
        return
    layout = f" ({spec.nodes} x {spec.ranks_per_node})"
    why = why_ranks_idle(spec.batch.global_batch_size, spec.world_size, spec.batch.unit, layout=layout)
    if why is not None:
        yield "batch.global_batch_size", why


def fixed_micro_batch_divides(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Reject a fixed micro-batch together with settings that follow from it, and one that does not divide the batch."""
    key = "batch.per_device_batch_size"
    size = spec.batch.per_device_batch_size
    batch = spec.batch.global_batch_size
    ranks = spec.world_size
    if size is None or batch is None:
        return
    for other in ("max_per_device_batch_size", "grad_accum_steps"):
        if getattr(spec.batch, other) is not None:
            yield key, f"is {size}, and batch.{other} is given too, which follows from it; keep one of them"
    # If B < W, batch_reaches_every_rank reports it.
    if batch >= ranks and batch % (ranks * size):
        yield (
            key,
            (
                f"is {size}, and {ranks} ranks ({spec.nodes} x {spec.ranks_per_node}) make {ranks * size} of "
                f"it in one micro-step, which does not divide batch.global_batch_size {batch}; write "
                f"{fixed_way_out(batch, ranks, size)}"
            ),
        )


def groups_are_named(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Reject ``unit: group`` without a function that names the groups, and such a function without it."""
    unit = spec.batch.unit
    group = spec.batch.group
    if unit == "group" and group is None:
        yield (
            "batch.unit",
            (
                "is group, but no function defines the groups; write batch.group: pkg.module:function, "
                "which gets the index of a sample and returns its group"
            ),
        )
    if unit != "group" and group is not None:
        yield "batch.group", f"is {group}, and batch.unit is {unit}; write batch.unit: group, or remove it"


def rule_fits_optimizer(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Reject a learning-rate rule that does not hold for the optimizer or for its constants."""
    if spec.train is not None and spec.batch.global_batch_size is not None:
        yield from scaling_findings(spec.learning_rate, spec.train.optimizer, spec.batch.global_batch_size)
