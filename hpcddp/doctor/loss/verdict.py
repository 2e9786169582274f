"""Judge a loss: compare its value and gradient on a whole batch with weighted sums of those on the ranks' shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import torch
from torch import Tensor

from hpcddp.doctor.errors import CannotJudgeError, NoLossError, UnusableError
from hpcddp.doctor.loss.batches import Batch, Split, judged_splits
from hpcddp.doctor.loss.call import Evaluation, Loss
from hpcddp.train.losses.state import repeat_call

# Relative, by the dtype of the loss: larger than rounding errors, smaller than the errors of a wrong split.
_TOLERANCE: Final = {torch.float64: 1e-6, torch.float32: 1e-4}
_COARSE_TOLERANCE: Final = 3e-2  # bfloat16 and half


class Verdict(StrEnum):
    """How a loss combines the samples of a batch, from the least harmful to the worst."""

    MEAN = "MEAN"
    SUM = "SUM"
    WEIGHTED_MEAN = "WEIGHTED MEAN"
    NOT_DECOMPOSABLE = "NOT DECOMPOSABLE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """Relative deviation of a result from the correct one.

    Args:
        value: of the loss; infinite if that of a share is not finite.
        gradient: of the gradient: the norm of the difference.
    """

    value: float = 0.0
    gradient: float = 0.0

    @property
    def worst(self) -> float:
        """The larger one."""
        return max(self.value, self.gradient)

    def joined(self, other: Deviation) -> Deviation:
        """Return the larger of both, in each part."""
        return Deviation(value=max(self.value, other.value), gradient=max(self.gradient, other.gradient))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ddp:
    """The result of plain DDP, the average over ranks, compared with one process.

    Args:
        shares: samples per rank.
        deviation: of value and gradient.
        ratio: norm of the gradient divided by the norm of the correct one.
    """

    shares: tuple[int, ...]
    deviation: Deviation
    ratio: float
    cosine: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The judgement of a loss on one batch.

    Args:
        deviations: the largest ones from the mean over samples, by the name of the split.
        ddp: the result of plain DDP at the user's world size.
    """

    batch: Batch
    verdict: Verdict
    deviations: dict[str, Deviation]
    ddp: Ddp
    dtype: torch.dtype


def judge(loss: Loss, batch: Batch, *, world_size: int) -> Judgement:
    """Compare the loss of a batch with those of its parts.

    Args:
        batch: at least ``world_size`` samples.
        world_size: W >= 2.

    Raises:
        UnusableError: the loss calls collectives, fails on a part, draws random numbers, or keeps state.
    """
    # The first calls show the most of a state.
    _refuse_state(loss, batch)
    loss.refuse_collectives(batch)
    whole = loss.evaluate(batch)
    _refuse_useless(loss, batch, whole)
    _refuse_noise(loss, batch, whole)

    splits = list(judged_splits(batch.samples, world_size))
    shares_of_splits = [_evaluate_shares(loss, batch, split) for split in splits]
    deviations: dict[str, Deviation] = {}
    from_sum = Deviation()
    from_weighted = Deviation()
    for split, shares in zip(splits, shares_of_splits, strict=True):
        mean = _combine(shares, split, [size / batch.samples for size in split.sizes])
        largest_until_now = deviations.get(split.name, Deviation())
        deviations[split.name] = largest_until_now.joined(_deviation(whole, mean))
        from_sum = from_sum.joined(_deviation(whole, _combine(shares, split, [1.0] * len(shares))))
        from_weighted = from_weighted.joined(_deviation_from_weighted_mean(whole, shares, split))

    tolerance = _tolerance(whole)
    verdict = Verdict.NOT_DECOMPOSABLE
    if all(deviation.worst <= tolerance for deviation in deviations.values()):
        verdict = Verdict.MEAN
    elif from_sum.worst <= tolerance:
        verdict = Verdict.SUM
    elif from_weighted.worst <= tolerance:
        verdict = Verdict.WEIGHTED_MEAN
    ddp = _compare_ddp(whole, shares_of_splits[0], splits[0])
    return Judgement(batch=batch, verdict=verdict, deviations=deviations, ddp=ddp, dtype=whole.dtype)


def _tolerance(evaluation: Evaluation) -> float:
    """Return the largest relative deviation that counts as rounding."""
    return _TOLERANCE.get(evaluation.dtype, _COARSE_TOLERANCE)


def _refuse_useless(loss: Loss, batch: Batch, whole: Evaluation) -> None:
    """Refuse a loss that is not finite, or does not depend on the outputs.

    Raises:
        NoLossError: it is so.
    """
    if not whole.finite:
        what = "has a gradient that is not finite" if math.isfinite(whole.value) else f"is {whole.value}"
        raise NoLossError(
            f"{loss.name} {what} on {batch.data} ({batch.describe()}), and nothing can be compared with that; "
            "give it batches like your own with --data module:function"
        )
    length = sum(float(gradient.norm()) for gradient in whole.gradients)
    if length <= 1e-12 * max(1.0, abs(whole.value)) / math.sqrt(batch.samples):
        raise NoLossError(
            f"{loss.name} is {whole.value:.6g} for all outputs ({batch.data}): its gradient is 0 everywhere, so "
            "that nothing can be learned from it; use the outputs themselves, not their comparison or rounding"
        )


def _refuse_state(loss: Loss, batch: Batch) -> None:
    """Refuse a loss whose value depends on the calls before it.

    Raises:
        CannotJudgeError: it does.
    """
    half = batch.part(torch.arange(batch.samples // 2))
    try:
        repeated = repeat_call(lambda: loss.evaluate(batch).value, lambda: loss.evaluate(half).value)
    except UnusableError:
        # It takes no such batch, or not half of it: the calls below show that.
        return
    if not repeated.is_equal:
        raise CannotJudgeError(
            f"{loss.name} gives {repeated.first:.6g} and, when it is called again, {repeated.again:.6g} for the same "
            "samples: its value depends on what it keeps from call to call. Each rank would keep its own, and no "
            "checkpoint holds it; write a loss that keeps nothing, or a training of your own (entrypoint) that saves "
            "it and makes it equal on all ranks"
        )


def _refuse_noise(loss: Loss, batch: Batch, whole: Evaluation) -> None:
    """Refuse a loss that draws random numbers, because nothing can be compared with it.

    Raises:
        CannotJudgeError: the loss does so.
    """
    again = loss.evaluate(batch, seed=1)
    if _deviation(whole, again).worst > _tolerance(whole):
        raise CannotJudgeError(
            f"{loss.name} draws random numbers: it gives {whole.value:.6g} and {again.value:.6g} for the same batch, "
            "and no split can be compared with that; name a version without noise (dropout probability 0)"
        )


def _evaluate_shares(loss: Loss, batch: Batch, split: Split) -> list[Evaluation]:
    """Evaluate the loss on the share of each rank.

    Raises:
        NoLossError: it fails on one.
    """
    shares = []
    for rows in split.rows:
        try:
            shares.append(loss.evaluate(batch.part(rows)))
        except UnusableError as error:
            reason = error.message.removeprefix(f"{loss.name} failed: ")
            raise NoLossError(
                f"{loss.name} takes all {batch.samples} samples, but not a share of {len(rows)}: {reason}; a loss must "
                "take any number of samples"
            ) from error
    return shares


def _combine(shares: Sequence[Evaluation], split: Split, weights: Sequence[float]) -> Evaluation:
    """Return the weighted sum of the shares' losses as one evaluation of the whole batch."""
    gradients = zip(*(share.gradients for share in shares), strict=True)
    parameter_gradients = zip(*(share.parameter_gradients for share in shares), strict=True)
    return Evaluation(
        value=sum(weight * share.value for weight, share in zip(weights, shares, strict=True)),
        gradients=tuple(_join_rows(parts, split, weights) for parts in gradients),
        parameter_gradients=tuple(_weighted_sum(parts, weights) for parts in parameter_gradients),
        dtype=shares[0].dtype,
    )


def _join_rows(parts: Sequence[Tensor], split: Split, weights: Sequence[float]) -> Tensor:
    """Return the gradient of the whole batch from those of its shares; outputs without rows per sample are summed."""
    for part, size in zip(parts, split.sizes, strict=True):
        if part.dim() == 0 or len(part) != size:
            return _weighted_sum(parts, weights)
    joined = parts[0].new_zeros((sum(split.sizes), *parts[0].shape[1:]))
    for part, rows, weight in zip(parts, split.rows, weights, strict=True):
        joined[rows] = weight * part
    return joined


def _weighted_sum(parts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    return torch.stack([weight * part for part, weight in zip(parts, weights, strict=True)]).sum(0)


def _deviation(right: Evaluation, evaluation: Evaluation) -> Deviation:
    """Return the relative deviation of an evaluation from the correct one of the same samples."""
    right_gradient = _flat_gradient(right)
    difference = _flat_gradient(evaluation) - right_gradient
    return Deviation(
        value=_relative(abs(evaluation.value - right.value), abs(right.value)),
        gradient=_relative(float(difference.norm()), float(right_gradient.norm())),
    )


def _deviation_from_weighted_mean(whole: Evaluation, shares: Sequence[Evaluation], split: Split) -> Deviation:
    """Return the deviation from the mean of the shares' losses with the weights that fit their gradients best.

    The gradient of a weighted mean, on the rows of a share, is the weight of the share times the share's gradient.
    """
    right_gradient = _flat_gradient(whole)
    weights = []
    for number in range(len(shares)):
        this_share_alone = [0.0] * len(shares)
        this_share_alone[number] = 1.0
        gradient = _flat_gradient(_combine(shares, split, this_share_alone))
        weights.append(_relative(float(gradient @ right_gradient), float(gradient @ gradient)))
    mean = _combine(shares, split, weights)
    return _deviation(whole, mean).joined(Deviation(value=abs(sum(weights) - 1)))


def _compare_ddp(whole: Evaluation, shares: Sequence[Evaluation], split: Split) -> Ddp:
    """Compare the average over ranks, which plain DDP trains, with one process."""
    average = _combine(shares, split, [1 / len(shares)] * len(shares))
    right = _flat_gradient(whole)
    averaged = _flat_gradient(average)
    right_length = float(right.norm())
    averaged_length = float(averaged.norm())
    return Ddp(
        shares=split.sizes,
        deviation=_deviation(whole, average),
        ratio=_relative(averaged_length, right_length),
        cosine=_relative(float(right @ averaged), right_length * averaged_length),
    )


def _flat_gradient(evaluation: Evaluation) -> Tensor:
    """Return all gradients in one vector."""
    return torch.cat([g.reshape(-1) for g in (*evaluation.gradients, *evaluation.parameter_gradients)])


def _relative(part: float, whole: float) -> float:
    """Return part / whole; the part itself if the whole is 0, and infinity if one of them is not finite."""
    if not math.isfinite(part) or not math.isfinite(whole):
        return math.inf
    return part / whole if whole else part
