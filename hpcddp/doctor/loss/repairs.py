"""Choose the helper that makes a loss exact, with two lines of code to paste."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch

from hpcddp.doctor.errors import UnusableError
from hpcddp.doctor.loss.batches import Batch, Split, even_split
from hpcddp.doctor.loss.call import Loss
from hpcddp.doctor.loss.verdict import Verdict, combine, flat_gradient, tolerance_of
from hpcddp.train.buffers import as_real

_TRIALS: Final = 3
_PARTS: Final = 3
_COARSE_TOLERANCE: Final = 0.1
# A central difference in double precision.
_STEP: Final = 1e-5
_DERIVATIVE_TOLERANCE: Final = 1e-4
# Samples that are moved, places at which each is looked at, and how much longer than the others a step is that jumps.
_MOVING: Final = 6
_PLACES: Final = 41
_JUMP: Final = 4.0
# Larger than the tolerance of the verdict: quotients of differences are compared, and an error only changes the advice.
_TOLERANCE: Final = 1e-5
# Functions of sums hardly change when every sample is repeated (only by a smoothing constant).
_DOUBLED_TOLERANCE: Final = 0.05
# How often other samples are put beside the same rows, and the most sums that are called few: a correlation has three
# that depend on the outputs, and a loss that selects or compares among 32 samples shows six directions or more. With
# fewer samples fewer are called few: a gather is exact for every loss.
_COMPANIES: Final = 40
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
    if verdict is Verdict.MEAN:
        return None
    if verdict is Verdict.SUM:
        return _for_sum(call)
    if verdict is Verdict.ORDER_DEPENDENT:
        return _gather(
            call, batch, "it depends on the order of the samples, and a gather restores the order of the global batch"
        )
    try:
        return _for_whole_batches(loss, batch, call, splits)
    except UnusableError:
        # The loss may fail on parts that are smaller than those of the verdict.
        return _gather(call, batch, "on gathered samples it computes the loss of the whole global batch")


def _for_sum(call: str) -> Repair:
    return Repair(
        helper="DeclaredLoss",
        why="DDP divides the sum by the number of ranks; declared a sum, it is multiplied by it",
        code=(
            "from hpcddp import DeclaredLoss, Reduction",
            f"loss = DeclaredLoss(function={call}, reduction=Reduction.SUM)  # or times dist.get_world_size()",
        ),
        loss_reduction="sum",
    )


def _for_whole_batches(loss: Loss, batch: Batch, call: str, splits: Sequence[Split]) -> Repair:
    kind = _mean_kind(loss, batch, splits)
    if kind == "weighted" and all(_is_weighted_mean(loss, batch, split) for split in splits):
        return Repair(
            helper="weighted_mean",
            why="it is a sum over samples divided by a sum of weights, which differs between shares",
            code=(
                "from hpcddp import weighted_mean",
                f"loss = weighted_mean(total, count)  # what {call} divides, and by what, on this rank",
            ),
        )
    if kind == "ratio":
        why = "it is one sum over samples divided by another"
        arguments = "lambda above, below: above / below, above, below"
    elif all(_is_root_mean(loss, batch, split) for split in splits):
        why = "it is the root of a mean, and a mean of roots is another number"
        arguments = "lambda s, n: (s / n).sqrt(), squares, count"
    elif _is_function_of_few_sums(loss, batch) and _has_true_gradient(loss, batch) and _is_smooth(loss, batch):
        why = "it is a function f of few sums over samples"
        arguments = "f, *sums"
    elif _changes_when_doubled(loss, batch):
        return _gather(call, batch, "it compares samples with each other, also samples of different ranks")
    else:
        return _gather(
            call,
            batch,
            "on gathered samples it computes the loss of the global batch, and it is no smooth function of few sums "
            "(one of many, such as a covariance matrix, can use additive_loss)",
        )
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
    gathered = ", ".join(
        _gathered(name, part, batch.dimension if position < batch.differentiable else 0)
        for position, (name, part) in enumerate(zip(names, batch.arguments, strict=False))
    )
    return Repair(
        helper="gather_with_grad", why=why, code=("from hpcddp import gather_with_grad", f"loss = {call}({gathered})")
    )


def _gathered(name: str, argument: object, dimension: int) -> str:
    if dimension and isinstance(argument, torch.Tensor):
        return f"gather_with_grad({name}.movedim({dimension}, 0)).movedim(0, {dimension})"
    if isinstance(argument, tuple):
        return f"[gather_with_grad(part) for part in {name}]"
    return f"gather_with_grad({name})" if isinstance(argument, torch.Tensor) else name


def _mean_kind(loss: Loss, batch: Batch, splits: Sequence[Split]) -> str | None:
    """Return ``weighted``, ``ratio`` or None.

    With f(AB) = (w_A f(A) + w_B f(B)) / (w_A + w_B), three parts give three quotients of weights from values alone,
    and one is the product of the others. Where the weights do not depend on the outputs, the gradient of f(AB) on the
    rows of A is w_A / (w_A + w_B) times that of f(A).
    """
    constant = True
    for trial in range(_TRIALS):
        a, b, c = even_split(batch.samples, _PARTS, seed=trial).rows
        first = _Pair(loss, batch, a, b)
        if not _is_consistent([first, _Pair(loss, batch, b, c), _Pair(loss, batch, a, c)], _TOLERANCE):
            return None
        constant = constant and first.weights_are_constant()
    for a, b, c in (split.rows[:_PARTS] for split in splits if len(split.rows) >= _PARTS):
        # Small parts, whose quotients are less exact.
        pairs = [_Pair(loss, batch, *rows) for rows in ((a, b), (b, c), (a, c))]
        if not _is_consistent(pairs, _COARSE_TOLERANCE):
            return None
    return "weighted" if constant else "ratio"


def _is_consistent(pairs: Sequence[_Pair], tolerance: float) -> bool:
    """Return whether the quotient of the weights of a and c, the last of the pairs, is the product of the other two."""
    ab, bc, ac = pairs
    if ab.quotient is None or bc.quotient is None or ac.quotient is None:
        return False
    product = ab.quotient * bc.quotient
    return abs(product - ac.quotient) <= tolerance * max(abs(product), abs(ac.quotient))


class _Pair:
    """Two parts of a batch, and both together."""

    def __init__(self, loss: Loss, batch: Batch, a: torch.Tensor, b: torch.Tensor) -> None:
        self._rows = len(a)
        self._first = loss.evaluate(batch.part(a))
        second = loss.evaluate(batch.part(b))
        self._both = loss.evaluate(batch.part(torch.cat((a, b))))
        above = second.value - self._both.value
        below = self._both.value - self._first.value
        # w_A / w_B; None if the values are too close, or are not weighted means.
        usable = self._both.finite and abs(below) > 1e-9 * abs(self._both.value) and above / below > 0
        self.quotient = above / below if usable else None

    def weights_are_constant(self) -> bool:
        """Return whether the second part only scales the gradient of the first part."""
        if self.quotient is None:
            return False
        factor = self.quotient / (1 + self.quotient)
        joined = torch.cat([g[: self._rows].reshape(-1) for g in self._both.gradients if g.dim()])
        alone = torch.cat([g.reshape(-1) for g in self._first.gradients if g.dim()])
        return bool((joined - factor * alone).norm() <= _TOLERANCE * joined.norm())


def _is_weighted_mean(loss: Loss, batch: Batch, split: Split) -> bool:
    """Return whether the loss is a mean of the losses of the shares, with weights that do not depend on the outputs.

    The gradient of the whole batch on the rows of a share is then the weight times the gradient of the share.
    """
    evaluated = loss.evaluate(batch)
    whole = flat_gradient(evaluated)
    tolerance = max(_TOLERANCE, tolerance_of(evaluated.dtype))
    parts = [loss.evaluate(batch.part(rows)) for rows in split.rows]
    weights = []
    for number in range(len(parts)):
        alone = flat_gradient(combine(parts, split, [float(number == other) for other in range(len(parts))]))
        length = float(alone @ alone)
        weights.append(float(alone @ whole) / length if length else 0.0)
    mean = combine(parts, split, weights)
    value = evaluated.value
    total = sum(weights)
    near = abs(mean.value - value) <= tolerance * abs(value) and abs(total - 1) <= tolerance
    return near and bool((flat_gradient(mean) - whole).norm() <= tolerance * whole.norm())


def _is_root_mean(loss: Loss, batch: Batch, split: Split) -> bool:
    """Return whether the square of the loss is the mean over the samples, and its gradient that of the mean."""
    whole = loss.evaluate(batch)
    parts = [loss.evaluate(batch.part(rows)) for rows in split.rows]
    # Half of the gradient of the square.
    halves = combine(
        parts, split, [size / batch.samples * part.value for size, part in zip(split.sizes, parts, strict=True)]
    )
    half = whole.value * flat_gradient(whole)
    near = abs(whole.value**2 - halves.value) <= _TOLERANCE * abs(halves.value)
    return near and bool((flat_gradient(halves) - half).norm() <= _TOLERANCE * half.norm())


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
        above, below = (_value_beside(loss, batch, directions, step) for step in (_STEP, -_STEP))
        slope = (above - below) / (2 * _STEP)
        pairs = zip(whole.gradients, directions, strict=True)
        right = sum(float((gradient * batch.rows_first(as_real(direction))).sum()) for gradient, direction in pairs)
        if abs(slope - right) > tolerance * float(flat_gradient(whole).norm()):
            return False
    return True


def _value_beside(loss: Loss, batch: Batch, directions: Sequence[torch.Tensor], step: float) -> float:
    """Return the loss of a batch whose outputs have moved by a step in their directions."""
    places = iter(directions)
    return loss.evaluate(batch.with_outputs(lambda output: output + step * next(places))).value


def _is_smooth(loss: Loss, batch: Batch) -> bool:
    """Return whether the gradients of some samples change without a jump while another sample moves.

    Where a loss takes the largest sample, or compares, they jump when another sample is taken.
    """
    first, other = even_split(batch.samples, 2, seed=0).rows
    moves = [(first, moving) for moving in other[:_MOVING]] + [(other, moving) for moving in first[:_MOVING]]
    return not any(_jumps(loss, batch, fixed, moving) for fixed, moving in moves)


def _jumps(loss: Loss, batch: Batch, fixed: torch.Tensor, moving: torch.Tensor) -> bool:
    rows = []
    for factor in torch.logspace(-1, 1, _PLACES, dtype=torch.float64):
        factors = torch.ones(batch.samples, dtype=torch.float64)
        factors[moving] = factor
        evaluation = loss.evaluate(batch.scaled(factors))
        if not evaluation.finite:
            return False
        rows.append(torch.cat([part[fixed].reshape(-1) for part in evaluation.gradients if part.dim()]))
    steps = torch.stack([(after - before).norm() for before, after in pairwise(rows)])
    return float(steps.max()) > _JUMP * float(steps.quantile(0.9)) + _TOLERANCE * float(rows[0].norm())


def _is_function_of_few_sums(loss: Loss, batch: Batch) -> bool:
    """Return whether samples influence each other's gradients only through a few sums.

    The loss f(sum of s(x)) has in row i the gradient ``J_i f'(S)``, with J_i the derivative of s at x_i. Other samples
    change f'(S) alone, so that the gradients of fixed rows lie in a space of as many dimensions as there are sums,
    whatever is beside them. If the loss compares, sorts or selects samples, each selection adds a direction.
    """
    g = torch.Generator().manual_seed(0)
    fixed, others = even_split(batch.samples, 2, seed=0).rows
    rows = []
    tolerance = _TOLERANCE
    for _ in range(_COMPANIES):
        # Few different samples, often repeated, move a threshold of the loss further than all of them.
        size, different = (int(torch.randint(1, most + 1, (), generator=g)) for most in (3 * len(others), len(others)))
        company = others[torch.randint(0, different, (size,), generator=g)]
        others = others[torch.randperm(len(others), generator=g)]
        evaluation = loss.evaluate(batch.part(torch.cat((fixed, company))))
        row = torch.cat([part[: len(fixed)].reshape(-1) for part in evaluation.gradients if part.dim()])
        rows.append(row / row.norm().clamp(min=torch.finfo(row.dtype).tiny))
        tolerance = tolerance_of(evaluation.dtype)
    lengths = torch.linalg.svdvals(torch.stack(rows))
    return int((lengths > tolerance * lengths[0]).sum()) <= min(_FEW_SUMS, batch.samples // _SAMPLES_PER_SUM)


def _changes_when_doubled(loss: Loss, batch: Batch) -> bool:
    """Return whether the loss changes when every sample is repeated, and so is no function of means over samples."""
    once = loss.evaluate(batch)
    twice = loss.evaluate(batch.part(torch.cat((torch.arange(batch.samples),) * 2)))
    return abs(once.value - twice.value) > _DOUBLED_TOLERANCE * abs(once.value)
