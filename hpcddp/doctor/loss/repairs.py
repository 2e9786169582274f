"""Choose the helper that makes a loss exact, with two lines of code to paste."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

import torch
from torch import Tensor

from hpcddp.doctor.errors import UnusableError
from hpcddp.doctor.loss.batches import Batch, Split, even_split
from hpcddp.doctor.loss.call import Evaluation, Loss
from hpcddp.doctor.loss.verdict import Verdict, combine, flat_gradient, tolerance_of
from hpcddp.train.buffers import as_real

# Larger than the tolerance of the verdict: quotients of differences are compared, and an error only changes the advice.
_TOLERANCE: Final = 1e-5
# For small parts, whose quotients are less exact.
_COARSE_TOLERANCE: Final = 0.1
_PARTS: Final = 3
_TRIALS: Final = 3
# A central difference in double precision.
_STEP: Final = 1e-5
_DERIVATIVE_TOLERANCE: Final = 1e-4
# Samples of each half that are moved, steps in which each is moved, and how much longer than the others a step is that
# jumps.
_MOVED_SAMPLES: Final = 6
_FACTORS: Final = 41
_JUMP: Final = 4.0
# Functions of sums hardly change when every sample is repeated (only by a smoothing constant).
_DOUBLED_TOLERANCE: Final = 0.05
# How often other samples are put beside the same rows, and the most sums that are called few: a correlation has three
# that depend on the outputs, and a loss that selects or compares among 32 samples shows six directions or more. With
# fewer samples fewer are called few: a gather is exact for every loss.
_DRAWS_OF_OTHERS: Final = 40
_FEW_SUMS: Final = 4
_SAMPLES_PER_SUM: Final = 8
_TWO_NAMES: Final = ("outputs", "targets")
_MORE_NAMES: Final = ("first", "second", "third", "fourth", "fifth", "sixth")


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """The helper that makes a loss exact.

    Args:
        helper: its name in ``hpcddp``; None = plain torch is enough.
        why: the reason, as a clause.
        code: two lines to paste.
        loss_reduction: ``train.loss_reduction`` of a job with the repaired loss.
    """

    helper: str | None
    why: str
    code: tuple[str, str]
    loss_reduction: str = "global"


def repair_for(loss: Loss, batch: Batch, verdict: Verdict, *, splits: Sequence[Split]) -> Repair | None:
    """Return the repair of a loss with this verdict on the batch; None if the loss is exact.

    Args:
        batch: the batch on which it is not exact.
        splits: the splits that were judged; a repair has the loss and the gradient of the whole batch on each.
    """
    call = loss.name.rpartition(":")[2].rpartition(".")[2]
    match verdict:
        case Verdict.MEAN:
            return None
        case Verdict.SUM:
            return _declared_sum(call)
        case Verdict.ORDER_DEPENDENT:
            why = "it depends on the order of the samples, and a gather restores the order of the global batch"
            return _gather(call, batch, why)
        case Verdict.NOT_DECOMPOSABLE:
            try:
                return _repair_not_decomposable(loss, batch, call, splits)
            except UnusableError:
                # The loss may fail on parts that are smaller than those of the verdict.
                return _gather(call, batch, "on gathered samples it computes the loss of the whole global batch")


def _repair_not_decomposable(loss: Loss, batch: Batch, call: str, splits: Sequence[Split]) -> Repair:
    """Return the repair of a loss that is no sum and no mean over samples: the simplest one that is exact.

    Raises:
        UnusableError: the loss fails on a part of the batch.
    """
    weights = _weights_of_parts(loss, batch, splits)
    if weights == "constant" and all(_is_weighted_mean(loss, batch, split) for split in splits):
        return _weighted_mean(call)
    if weights == "varying":
        return _additive_loss(
            "lambda above, below: above / below, above, below", "it is one sum over samples divided by another"
        )
    if all(_is_root_mean(loss, batch, split) for split in splits):
        return _additive_loss(
            "lambda s, n: (s / n).sqrt(), squares, count",
            "it is the root of a mean, and a mean of roots is another number",
        )
    if _is_function_of_few_sums(loss, batch) and _has_true_gradient(loss, batch) and _is_smooth(loss, batch):
        return _additive_loss("f, *sums", "it is a function f of few sums over samples")
    if _changes_when_doubled(loss, batch):
        return _gather(call, batch, "it compares samples with each other, also samples of different ranks")
    return _gather(
        call,
        batch,
        "on gathered samples it computes the loss of the global batch, and it is no smooth function of few sums "
        "(one of many, such as a covariance matrix, can use additive_loss)",
    )


def _declared_sum(call: str) -> Repair:
    return Repair(
        helper="DeclaredLoss",
        why="DDP divides the sum by the number of ranks; declared a sum, it is multiplied by it",
        code=(
            "from hpcddp import DeclaredLoss, Reduction",
            f"loss = DeclaredLoss(function={call}, reduction=Reduction.SUM)  # or times dist.get_world_size()",
        ),
        loss_reduction="sum",
    )


def _weighted_mean(call: str) -> Repair:
    return Repair(
        helper="weighted_mean",
        why="it is a sum over samples divided by a sum of weights, which differs between shares",
        code=(
            "from hpcddp import weighted_mean",
            f"loss = weighted_mean(total, count)  # what {call} divides, and by what, on this rank",
        ),
    )


def _additive_loss(arguments: str, why: str) -> Repair:
    return Repair(
        helper="additive_loss",
        why=why,
        code=(
            "from hpcddp import additive_loss",
            f"loss = additive_loss({arguments})  # sums over this rank's samples",
        ),
    )


def _gather(call: str, batch: Batch, why: str) -> Repair:
    names = _TWO_NAMES if len(batch.arguments) <= len(_TWO_NAMES) else _MORE_NAMES
    arguments = []
    for position, (name, argument) in enumerate(zip(names, batch.arguments, strict=False)):
        dimension = batch.dimension if position < batch.differentiable else 0
        arguments.append(_gathered(name, argument, dimension))
    return Repair(
        helper="gather_with_grad",
        why=why,
        code=("from hpcddp import gather_with_grad", f"loss = {call}({', '.join(arguments)})"),
    )


def _gathered(name: str, argument: object, dimension: int) -> str:
    """Return the code that gathers an argument; ``dimension`` is the one that counts samples."""
    if isinstance(argument, tuple):
        return f"[gather_with_grad(part) for part in {name}]"
    if not isinstance(argument, Tensor):
        return name
    if dimension:
        return f"gather_with_grad({name}.movedim({dimension}, 0)).movedim(0, {dimension})"
    return f"gather_with_grad({name})"


def _weights_of_parts(loss: Loss, batch: Batch, splits: Sequence[Split]) -> Literal["constant", "varying"] | None:
    """Return whether the loss is a weighted mean of those of its parts, and whether the weights depend on the outputs.

    With f(AB) = (w_A f(A) + w_B f(B)) / (w_A + w_B), three parts give three quotients of weights from values alone,
    and one is the product of the others. Where the weights do not depend on the outputs, the gradient of f(AB) on the
    rows of A is w_A / (w_A + w_B) times that of f(A).

    Returns:
        None if the loss is no weighted mean of its parts.
    """
    are_constant = True
    for trial in range(_TRIALS):
        parts = even_split(batch.samples, _PARTS, seed=trial).rows
        if not _quotients_fit(loss, batch, parts, _TOLERANCE):
            return None
        are_constant = are_constant and _TwoParts(loss, batch, parts[0], parts[1]).has_constant_weights()
    for split in splits:
        if len(split.rows) >= _PARTS and not _quotients_fit(loss, batch, split.rows[:_PARTS], _COARSE_TOLERANCE):
            return None
    return "constant" if are_constant else "varying"


def _quotients_fit(loss: Loss, batch: Batch, parts: Sequence[Tensor], tolerance: float) -> bool:
    """Return whether the quotient of the weights of a and c is that of a and b times that of b and c."""
    a, b, c = parts
    ab = _TwoParts(loss, batch, a, b).quotient
    bc = _TwoParts(loss, batch, b, c).quotient
    ac = _TwoParts(loss, batch, a, c).quotient
    if ab is None or bc is None or ac is None:
        return False
    return abs(ab * bc - ac) <= tolerance * max(abs(ab * bc), abs(ac))


class _TwoParts:
    """Two parts a and b of a batch, and both together.

    Attributes:
        quotient: w_A / w_B; None if the values are too close, or are not weighted means.
    """

    def __init__(self, loss: Loss, batch: Batch, a: Tensor, b: Tensor) -> None:
        self._rows = len(a)
        self._first = loss.evaluate(batch.part(a))
        second = loss.evaluate(batch.part(b))
        self._both = loss.evaluate(batch.part(torch.cat((a, b))))
        self.quotient: float | None = None
        above = second.value - self._both.value
        below = self._both.value - self._first.value
        if self._both.finite and abs(below) > 1e-9 * abs(self._both.value) and above / below > 0:
            self.quotient = above / below

    def has_constant_weights(self) -> bool:
        """Return whether the second part only scales the gradient of the first part."""
        if self.quotient is None:
            return False
        weight = self.quotient / (1 + self.quotient)
        beside_second = _gradient_of_rows(self._both, slice(self._rows))
        alone = _gradient_of_rows(self._first, slice(None))
        return bool((beside_second - weight * alone).norm() <= _TOLERANCE * beside_second.norm())


def _gradient_of_rows(evaluation: Evaluation, rows: slice | Tensor) -> Tensor:
    """Return the gradients on some samples in one vector, without those of outputs that are scalars."""
    return torch.cat([gradient[rows].reshape(-1) for gradient in evaluation.gradients if gradient.dim()])


def _is_weighted_mean(loss: Loss, batch: Batch, split: Split) -> bool:
    """Return whether the loss is a mean of the losses of the shares, with weights that do not depend on the outputs.

    The gradient of the whole batch on the rows of a share is then the weight times the gradient of the share.
    """
    whole = loss.evaluate(batch)
    whole_gradient = flat_gradient(whole)
    tolerance = max(_TOLERANCE, tolerance_of(whole.dtype))
    shares = [loss.evaluate(batch.part(rows)) for rows in split.rows]

    weights = []
    for number in range(len(shares)):
        this_share_alone = [0.0] * len(shares)
        this_share_alone[number] = 1.0
        share_gradient = flat_gradient(combine(shares, split, this_share_alone))
        square = float(share_gradient @ share_gradient)
        weights.append(float(share_gradient @ whole_gradient) / square if square else 0.0)

    mean = combine(shares, split, weights)
    return (
        _is_near(sum(weights), 1.0, tolerance)
        and _is_near(mean.value, whole.value, tolerance)
        and _is_near_vector(flat_gradient(mean), whole_gradient, tolerance)
    )


def _is_root_mean(loss: Loss, batch: Batch, split: Split) -> bool:
    """Return whether the square of the loss is the mean over the samples, and its gradient that of the mean."""
    whole = loss.evaluate(batch)
    shares = [loss.evaluate(batch.part(rows)) for rows in split.rows]
    # The weight of a share is its part of the samples times its loss, so that these are the mean of the squares, and
    # half of its gradient.
    weights = [size / batch.samples * share.value for size, share in zip(split.sizes, shares, strict=True)]
    mean_square = combine(shares, split, weights)
    half_gradient = whole.value * flat_gradient(whole)
    if not _is_near(whole.value**2, mean_square.value, _TOLERANCE):
        return False
    return _is_near_vector(flat_gradient(mean_square), half_gradient, _TOLERANCE)


def _is_near(value: float, right: float, tolerance: float) -> bool:
    return abs(value - right) <= tolerance * abs(right)


def _is_near_vector(vector: Tensor, right: Tensor, tolerance: float) -> bool:
    return bool((vector - right).norm() <= tolerance * right.norm())


def _has_true_gradient(loss: Loss, batch: Batch) -> bool:
    """Return whether the gradient of the loss is the derivative of its value, with nothing detached.

    A helper differentiates all that it is given.
    """
    # Other directions than those of the batch itself, along which many losses do not change.
    g = torch.Generator().manual_seed(7)
    whole = loss.evaluate(batch)
    tolerance = max(_DERIVATIVE_TOLERANCE, tolerance_of(whole.dtype))
    for _ in range(_TRIALS):
        directions = [torch.randn(output.shape, generator=g, dtype=output.dtype) for output in batch.outputs]
        above = _value_beside(loss, batch, directions, _STEP)
        below = _value_beside(loss, batch, directions, -_STEP)
        slope = (above - below) / (2 * _STEP)
        slope_by_gradient = sum(
            float((gradient * batch.rows_first(as_real(direction))).sum())
            for gradient, direction in zip(whole.gradients, directions, strict=True)
        )
        if abs(slope - slope_by_gradient) > tolerance * float(flat_gradient(whole).norm()):
            return False
    return True


def _value_beside(loss: Loss, batch: Batch, directions: Sequence[Tensor], step: float) -> float:
    """Return the loss of a batch whose outputs have moved by a step in their directions."""
    moved = [output + step * direction for output, direction in zip(batch.outputs, directions, strict=True)]
    return loss.evaluate(batch.with_outputs(moved)).value


def _is_smooth(loss: Loss, batch: Batch) -> bool:
    """Return whether the gradients of some samples change without a jump while another sample moves.

    Where a loss takes the largest sample, or compares, they jump when another sample is taken.
    """
    first_half, second_half = even_split(batch.samples, 2, seed=0).rows
    for fixed, moved in ((first_half, second_half), (second_half, first_half)):
        if any(_jumps(loss, batch, fixed, sample) for sample in moved[:_MOVED_SAMPLES]):
            return False
    return True


def _jumps(loss: Loss, batch: Batch, fixed: Tensor, moved: Tensor) -> bool:
    """Return whether the gradients of the fixed samples jump while the moved one is scaled from 0.1 to 10."""
    gradients = []
    for factor in torch.logspace(-1, 1, _FACTORS, dtype=torch.float64):
        factors = torch.ones(batch.samples, dtype=torch.float64)
        factors[moved] = factor
        evaluation = loss.evaluate(batch.scaled(factors))
        if not evaluation.finite:
            return False
        gradients.append(_gradient_of_rows(evaluation, fixed))
    steps = torch.stack([(after - before).norm() for before, after in pairwise(gradients)])
    usual_step = float(steps.quantile(0.9))
    return float(steps.max()) > _JUMP * usual_step + _TOLERANCE * float(gradients[0].norm())


def _is_function_of_few_sums(loss: Loss, batch: Batch) -> bool:
    """Return whether samples influence each other's gradients only through a few sums.

    The loss f(sum of s(x)) has in row i the gradient ``J_i f'(S)``, with J_i the derivative of s at x_i. Other samples
    change f'(S) alone, so that the gradients of fixed rows lie in a space of as many dimensions as there are sums,
    whatever is beside them. If the loss compares, sorts or selects samples, each selection adds a direction.
    """
    g = torch.Generator().manual_seed(0)
    fixed, others = even_split(batch.samples, 2, seed=0).rows
    directions = []
    tolerance = _TOLERANCE
    for _ in range(_DRAWS_OF_OTHERS):
        # Few different samples, often repeated, move a threshold of the loss further than all of them.
        size = int(torch.randint(1, 3 * len(others) + 1, (), generator=g))
        different = int(torch.randint(1, len(others) + 1, (), generator=g))
        drawn = others[torch.randint(0, different, (size,), generator=g)]
        others = others[torch.randperm(len(others), generator=g)]
        evaluation = loss.evaluate(batch.part(torch.cat((fixed, drawn))))
        gradient = _gradient_of_rows(evaluation, slice(len(fixed)))
        directions.append(gradient / gradient.norm().clamp(min=torch.finfo(gradient.dtype).tiny))
        tolerance = tolerance_of(evaluation.dtype)
    lengths = torch.linalg.svdvals(torch.stack(directions))
    dimensions = int((lengths > tolerance * lengths[0]).sum())
    return dimensions <= min(_FEW_SUMS, batch.samples // _SAMPLES_PER_SUM)


def _changes_when_doubled(loss: Loss, batch: Batch) -> bool:
    """Return whether the loss changes when every sample is repeated, and so is no function of means over samples."""
    samples = torch.arange(batch.samples)
    once = loss.evaluate(batch)
    twice = loss.evaluate(batch.part(torch.cat((samples, samples))))
    return abs(twice.value - once.value) > _DOUBLED_TOLERANCE * abs(once.value)
