"""Judge a loss: compare its value and gradient on a whole batch with weighted sums of those on the ranks' shares."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import torch
from torch import Tensor

from hpcddp.doctor.errors import NoisyLossError, NoLossError, UnusableError
from hpcddp.doctor.loss.batches import Batch, Split, even_split, random_splits
from hpcddp.doctor.loss.call import Evaluation, Loss
from hpcddp.train.losses.state import repeat_call

# Relative, by the dtype of the loss: larger than rounding errors, smaller than the errors of a wrong split.
_TOLERANCE: Final = {torch.float64: 1e-6, torch.float32: 1e-4}
_COARSE_TOLERANCE: Final = 3e-2  # bfloat16 and half


class Verdict(StrEnum):
    """How a loss combines the samples of a batch, from the least harmful to the worst."""

    MEAN = "MEAN"
    SUM = "SUM"
    NOT_DECOMPOSABLE = "NOT DECOMPOSABLE"
    ORDER_DEPENDENT = "ORDER-DEPENDENT"

    @property
    def severity(self) -> int:
        """0 for MEAN, more for what is worse."""
        return list(Verdict).index(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """Relative deviation of a result from the correct one.

    Args:
        value: of the loss; NaN if that of a share is not finite.
        gradient: of the gradient: the norm of the difference.
    """

    value: float = 0.0
    gradient: float = 0.0

    @property
    def worst(self) -> float:
        """The larger one; infinite if one is NaN."""
        if math.isnan(self.value) or math.isnan(self.gradient):
            return math.inf
        return max(self.value, self.gradient)

    def joined(self, other: Deviation) -> Deviation:
        """Return the larger of both, in each part."""
        return Deviation(value=_larger(self.value, other.value), gradient=_larger(self.gradient, other.gradient))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ddp:
    """The result of plain DDP, the average over ranks, compared with one process.

    Args:
        deviation: of value and gradient.
        ratio: norm of the gradient divided by the norm of the correct one.
    """

    deviation: Deviation
    ratio: float
    cosine: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The judgement of a loss on one batch.

    Args:
        deviations: from the weighted mean of the shares, by kind of split; ``order`` is the whole batch permuted.
        ddp: the result of plain DDP at the user's world size.
        changes_arguments: whether the loss changes its arguments in place.
        bad_share: samples of a share on which the loss is not finite; None if it is finite on all.
    """

    verdict: Verdict
    deviations: dict[str, Deviation]
    ddp: Ddp
    dtype: torch.dtype
    changes_arguments: bool
    bad_share: int | None


def judge(loss: Loss, batch: Batch, *, world_size: int, seed: int = 0) -> Judgement:
    """Compare the loss of a batch with those of its parts.

    Args:
        batch: at least ``world_size`` samples.
        world_size: W >= 2.
        seed: seed of the random splits.

    Raises:
        UnusableError: the loss fails on a part, draws random numbers, or keeps state.
    """
    whole = loss.evaluate(batch)
    _refuse_state(loss, batch)
    _refuse_noise(loss, batch, whole)
    order = _order_deviation(loss, batch, whole, seed)

    splits = judged_splits(batch.samples, world_size, seed)
    parts_of_splits = [_evaluate_parts(loss, batch, split) for split in splits]
    deviations = {"order": order}
    from_sum = Deviation()
    for split, parts in zip(splits, parts_of_splits, strict=True):
        mean = combine(parts, split, [size / batch.samples for size in split.sizes])
        largest_until_now = deviations.get(split.name, Deviation())
        deviations[split.name] = largest_until_now.joined(deviation(whole, mean))
        total = combine(parts, split, [1.0] * len(parts))
        from_sum = from_sum.joined(deviation(whole, total))
    average_over_ranks = combine(parts_of_splits[0], splits[0], [1 / world_size] * world_size)
    return Judgement(
        verdict=_verdict(deviations, from_sum, tolerance_of(whole.dtype)),
        deviations=deviations,
        ddp=_compare_ddp(whole, average_over_ranks),
        dtype=whole.dtype,
        changes_arguments=whole.changed_arguments,
        bad_share=_first_bad_share(splits, parts_of_splits),
    )


def judged_splits(samples: int, world_size: int, seed: int) -> list[Split]:
    """Return the splits on which a loss is judged: the even one first."""
    return [even_split(samples, world_size), *random_splits(samples, world_size, seed)]


def tolerance_of(dtype: torch.dtype) -> float:
    """Return the largest relative deviation that counts as rounding, for a loss of this dtype."""
    return _TOLERANCE.get(dtype, _COARSE_TOLERANCE)


def deviation(right: Evaluation, evaluation: Evaluation) -> Deviation:
    """Return the relative deviation of an evaluation from the correct one of the same samples."""
    right_gradient = flat_gradient(right)
    difference = flat_gradient(evaluation) - right_gradient
    return Deviation(
        value=_relative(abs(evaluation.value - right.value), abs(right.value)),
        gradient=_relative(float(difference.norm()), float(right_gradient.norm())),
    )


def flat_gradient(evaluation: Evaluation) -> Tensor:
    """Return all gradients in one vector."""
    return torch.cat([g.reshape(-1) for g in (*evaluation.gradients, *evaluation.parameter_gradients)])


def is_constant(evaluation: Evaluation, batch: Batch) -> bool:
    """Return whether the loss does not depend on the outputs, apart from rounding."""
    length = sum(float(gradient.norm()) for gradient in evaluation.gradients)
    return length <= 1e-12 * max(1.0, abs(evaluation.value)) / math.sqrt(batch.samples)


def _verdict(deviations: Mapping[str, Deviation], from_sum: Deviation, tolerance: float) -> Verdict:
    """Return the verdict.

    Args:
        from_sum: the largest deviation from the sum of the shares' losses, over all splits.
        tolerance: the largest deviation that counts as rounding.
    """
    if deviations["order"].worst > tolerance:
        return Verdict.ORDER_DEPENDENT
    if all(from_mean.worst <= tolerance for from_mean in deviations.values()):
        return Verdict.MEAN
    if from_sum.worst <= tolerance:
        return Verdict.SUM
    return Verdict.NOT_DECOMPOSABLE


def _first_bad_share(splits: Sequence[Split], parts_of_splits: Sequence[Sequence[Evaluation]]) -> int | None:
    """Return the samples of the first share on which the loss is not finite; None if it is finite on all."""
    for split, parts in zip(splits, parts_of_splits, strict=True):
        for size, part in zip(split.sizes, parts, strict=True):
            if not part.finite:
                return size
    return None


def _refuse_noise(loss: Loss, batch: Batch, first: Evaluation) -> None:
    """Refuse a loss that gives different values for the same batch, because nothing can be compared with it.

    Raises:
        NoisyLossError: the loss does so.
    """
    repeated = loss.evaluate(batch)
    reseeded = loss.evaluate(batch, seed=1)
    for again, reason in (
        (repeated, "keeps something from call to call or draws numbers that torch's seed does not decide"),
        (reseeded, "draws random numbers"),
    ):
        if deviation(first, again).worst > tolerance_of(first.dtype):
            raise NoisyLossError(
                f"{loss.name} {reason}: it gives {first.value:.6g} and {again.value:.6g} for the same batch, and no "
                "split can be compared with that; name a version without noise and state (dropout probability 0)"
            )


def _refuse_state(loss: Loss, batch: Batch) -> None:
    """Refuse a loss whose value depends on the calls before it.

    Raises:
        NoisyLossError: it does.
    """
    half = batch.part(torch.arange(batch.samples // 2))
    try:
        repeated = repeat_call(lambda: loss.evaluate(batch).value, lambda: loss.evaluate(half).value)
    except UnusableError:
        # It fails on half of the batch, which the shares show.
        return
    if not repeated.is_equal:
        raise NoisyLossError(
            f"{loss.name} gives {repeated.first:.6g} and, when it is called again, {repeated.again:.6g} for the same "
            "samples: its value depends on what it keeps from call to call. Each rank would keep its own, and no "
            "checkpoint holds it; write a loss that keeps nothing, or a training of your own (entrypoint) that saves "
            "it and makes it equal on all ranks"
        )


def _order_deviation(loss: Loss, batch: Batch, whole: Evaluation, seed: int) -> Deviation:
    """Return the deviation of the loss when the samples are permuted."""
    permutation = even_split(batch.samples, 1, seed=seed)
    permuted = loss.evaluate(batch.part(permutation.rows[0]))
    return deviation(whole, combine([permuted], permutation, [1.0]))


def _evaluate_parts(loss: Loss, batch: Batch, split: Split) -> list[Evaluation]:
    """Evaluate the loss on the share of each rank.

    Raises:
        NoLossError: it fails on one.
    """
    parts = []
    for rows in split.rows:
        try:
            parts.append(loss.evaluate(batch.part(rows)))
        except UnusableError as error:
            reason = error.message.removeprefix(f"{loss.name} failed: ")
            raise NoLossError(
                f"{loss.name} takes all {batch.samples} samples, but not a share of {len(rows)}: {reason}; a loss must "
                "take any number of samples"
            ) from error
    return parts


def combine(parts: Sequence[Evaluation], split: Split, weights: Sequence[float]) -> Evaluation:
    """Return the weighted sum of the shares' losses as one evaluation of the whole batch."""
    value = math.nan
    if all(part.finite for part in parts):
        value = math.fsum(weight * part.value for weight, part in zip(weights, parts, strict=True))
    gradients = zip(*(part.gradients for part in parts), strict=True)
    parameter_gradients = zip(*(part.parameter_gradients for part in parts), strict=True)
    return Evaluation(
        value=value,
        gradients=tuple(_join_rows(shares, split, weights) for shares in gradients),
        parameter_gradients=tuple(_weighted_sum(shares, weights) for shares in parameter_gradients),
        dtype=parts[0].dtype,
        changed_arguments=False,
    )


def _join_rows(shares: Sequence[Tensor], split: Split, weights: Sequence[float]) -> Tensor:
    """Return the gradient of the whole batch from those of its shares; outputs without rows per sample are summed."""
    for share, size in zip(shares, split.sizes, strict=True):
        if share.dim() == 0 or len(share) != size:
            return _weighted_sum(shares, weights)
    joined = shares[0].new_zeros((sum(split.sizes), *shares[0].shape[1:]))
    for share, rows, weight in zip(shares, split.rows, weights, strict=True):
        joined[rows] = weight * share
    return joined


def _weighted_sum(shares: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    return torch.stack([weight * share for share, weight in zip(shares, weights, strict=True)]).sum(0)


def _compare_ddp(whole: Evaluation, average: Evaluation) -> Ddp:
    """Compare the average over ranks, which plain DDP trains, with one process."""
    right = flat_gradient(whole)
    averaged = flat_gradient(average)
    right_length = float(right.norm())
    averaged_length = float(averaged.norm())
    return Ddp(
        deviation=deviation(whole, average),
        ratio=_relative(averaged_length, right_length),
        cosine=_relative(float(right @ averaged), right_length * averaged_length),
    )


def _relative(part: float, whole: float) -> float:
    """Return part / whole; the part itself if the whole is 0."""
    return part / whole if whole else part


def _larger(a: float, b: float) -> float:
    """Return the larger number; NaN if one of them is."""
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)
