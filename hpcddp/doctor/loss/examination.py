"""``hpcddp doctor loss``: judge a loss on plain batches or on the user's own, by those of its parts, and report."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from hpcddp.doctor.errors import CannotJudgeError, DoctorError, NoLossError, UnusableError, percent
from hpcddp.doctor.loss.call import (
    Batch,
    Evaluation,
    Loss,
    Split,
    arguments_needed,
    as_doctor_error,
    judged_splits,
    load_loss,
    load_object,
    make_batch,
    plain_batches,
)
from hpcddp.run.metrics import finite_number
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
        deviation: the largest one from the mean over samples, of all splits.
        ddp: the result of plain DDP at the user's world size.
    """

    batch: Batch
    verdict: Verdict
    deviation: Deviation
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
    from_mean = Deviation()
    from_sum = Deviation()
    from_weighted = Deviation()
    for split, shares in zip(splits, shares_of_splits, strict=True):
        mean = _combine(shares, split, [len(rows) / batch.samples for rows in split])
        from_mean = from_mean.joined(_deviation(whole, mean))
        from_sum = from_sum.joined(_deviation(whole, _combine(shares, split, [1.0] * len(shares))))
        from_weighted = from_weighted.joined(_deviation_from_weighted_mean(whole, shares, split))

    tolerance = _tolerance(whole)
    verdict = Verdict.NOT_DECOMPOSABLE
    if from_mean.worst <= tolerance:
        verdict = Verdict.MEAN
    elif from_sum.worst <= tolerance:
        verdict = Verdict.SUM
    elif from_weighted.worst <= tolerance:
        verdict = Verdict.WEIGHTED_MEAN
    ddp = _compare_ddp(whole, shares_of_splits[0], splits[0])
    return Judgement(batch=batch, verdict=verdict, deviation=from_mean, ddp=ddp, dtype=whole.dtype)


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
    for rows in split:
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
    for part, rows in zip(parts, split, strict=True):
        if part.dim() == 0 or len(part) != len(rows):
            return _weighted_sum(parts, weights)
    joined = parts[0].new_zeros((sum(map(len, split)), *parts[0].shape[1:]))
    for part, rows, weight in zip(parts, split, weights, strict=True):
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
        shares=tuple(map(len, split)),
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


_LEAST_RANKS: Final = 2
_PLAIN_SAMPLES: Final = 32
# Words of torch's errors about tensors of different dtypes.
_DTYPE_WORDS: Final = ("dtype", "scalar type", "Double")
_PLAIN_NOTE: Final = (
    "If some labels are ignored or padded, give batches like your own with --data: the verdict may be another one."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Result of ``hpcddp doctor loss``.

    Args:
        judgement: the one that decides: the worst of all batches.
        notes: further observations, one sentence each.
    """

    loss: str
    judgement: Judgement
    notes: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        """The verdict on the loss."""
        return self.judgement.verdict


def examine(
    name: str, *, world_size: int, samples: int | None, data: str | None, directory: Path, batch_dim: int = 0
) -> Diagnosis:
    """Run a loss on batches and on their parts, and return the diagnosis.

    Args:
        name: ``module:function``.
        world_size: W, number of ranks that share a batch.
        samples: samples of a plain batch; None = 32, or the size of the user's batches.
        data: ``module:function`` or a file with the user's own batches; None = plain batches.
        directory: where modules and files are searched first.
        batch_dim: the dimension of the outputs of the user's batches that counts samples.

    Raises:
        DoctorError: the loss or the data cannot be loaded, or the loss cannot be judged on them.
    """
    if world_size < _LEAST_RANKS:
        raise DoctorError(f"--world-size is {world_size}, and one rank has the whole batch; write 2 or more")
    if data is None and batch_dim:
        raise DoctorError(f"--batch-dim is {batch_dim}, and says how batches of --data lie; give some, or leave it out")
    if data is not None and samples is not None:
        raise DoctorError(f"--batch is {samples}, but the batches of --data {data} have a size; leave it out")
    with _settings(directory):
        loss = Loss(name=name, function=load_loss(name))
        if data is None:
            size = _PLAIN_SAMPLES if samples is None else samples
            _refuse_small(size, world_size, "--batch")
            judgements = _judge_plain(loss, size, world_size)
        else:
            batches = _own_batches(loss, data, directory, batch_dim, world_size)
            judgements = [_judge_in_some_dtype(loss, batch, world_size) for batch in batches]
    # Of equal verdicts the first one decides.
    worst = max(judgements, key=lambda judgement: list(Verdict).index(judgement.verdict))
    return Diagnosis(loss=name, judgement=worst, notes=tuple(_notes(worst, judgements, is_plain=data is None)))


@contextlib.contextmanager
def _settings(directory: Path) -> Iterator[None]:
    """Import from ``directory`` first; compute in float64, and on one thread, which is faster for many small calls."""
    path = [*sys.path]
    threads = torch.get_num_threads()
    dtype = torch.get_default_dtype()
    # The process group of one process, with which collectives are noticed, needs no network.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    sys.path.insert(0, str(directory))
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        sys.path[:] = path
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)


def _judge_plain(loss: Loss, samples: int, world_size: int) -> list[Judgement]:
    """Judge a loss on the plain kinds of batch that it accepts.

    Raises:
        UnusableError: it accepts none, or nothing can be compared on any.
    """
    judgements: list[Judgement] = []
    refused: dict[str, UnusableError] = {}
    for batch in plain_batches(samples):
        try:
            judgements.append(_judge_in_some_dtype(loss, batch, world_size))
        except CannotJudgeError:
            raise
        except UnusableError as error:
            refused[batch.data] = error
    if judgements:
        return judgements
    kinds: dict[str, str] = {}
    for kind, refusal in refused.items():
        if isinstance(refusal, NoLossError):
            # It runs, and what it returns is wrong.
            raise refusal
        kinds.setdefault(refusal.message.removeprefix(f"{loss.name} failed: "), kind)
    reasons = "; ".join(f"on {kind}: {reason}" for reason, kind in kinds.items())
    raise UnusableError(
        f"{loss.name} takes none of the plain kinds of batch ({reasons}); give it batches like your own with --data "
        "module:function, which returns (outputs, targets)"
    )


def _judge_in_some_dtype(loss: Loss, batch: Batch, world_size: int) -> Judgement:
    """Judge a loss on a batch in float64, or in float32 if it requires that dtype.

    Raises:
        UnusableError: the loss accepts neither, or its results cannot be compared.
    """
    try:
        return judge(loss, batch.to(torch.float64), world_size=world_size)
    except NoLossError:
        raise
    except UnusableError as error:
        if not any(word in error.message for word in _DTYPE_WORDS):
            raise
    return judge(loss, batch.to(torch.float32), world_size=world_size)


def _own_batches(loss: Loss, data: str, directory: Path, dimension: int, world_size: int) -> list[Batch]:
    """Return the user's own batches.

    Args:
        dimension: the dimension of the outputs that counts samples.

    Raises:
        DoctorError: they cannot be loaded, are not pairs (outputs, targets), or are too small.
    """
    given = _load_data(data, directory)
    pairs = given if isinstance(given, list) else [given]
    if not pairs:
        raise DoctorError(f"{data} gives no batches; return (outputs, targets) or a list of such pairs")
    needed = arguments_needed(loss.function)
    batches = [make_batch(pair, name=data, arguments=needed, dimension=dimension) for pair in pairs]
    for number, batch in enumerate(batches):
        _refuse_small(batch.samples, world_size, f"batch {number} of {data}")
    return batches


def _load_data(data: str, directory: Path) -> object:
    """Return what a function gives, or what is in a file written by ``torch.save``.

    Raises:
        DoctorError: it cannot be loaded.
    """
    path = directory / data
    if path.is_file():
        with as_doctor_error(f"reading {data} failed"):
            return torch.load(path, map_location="cpu", weights_only=True)
    if ":" not in data:
        raise DoctorError(f"--data is {data}, and there is no such file; write the name of a file, or module:function")
    function = load_object(data, what="a function that returns batches")
    if not callable(function):
        raise DoctorError(f"{data} is a {type(function).__name__}, which cannot be called; name a function")
    with as_doctor_error(f"{data}() failed"):
        return function()


def _refuse_small(samples: int, world_size: int, where: str) -> None:
    if samples < world_size:
        raise DoctorError(
            f"{where} is {samples} samples, fewer than the {world_size} ranks, so that some would have none; "
            f"write {2 * world_size} or more, or a smaller --world-size"
        )


def _notes(worst: Judgement, judgements: Sequence[Judgement], *, is_plain: bool) -> Iterator[str]:
    for judgement in judgements:
        if judgement.verdict is not worst.verdict:
            data = judgement.batch.data
            yield f"On {data} it is {judgement.verdict}: give batches like your own with --data to be sure."
            return
    if is_plain and worst.verdict is Verdict.MEAN:
        yield _PLAIN_NOTE


@dataclass(frozen=True, slots=True, kw_only=True)
class _Advice:
    """What a verdict means, and what makes such a loss exact.

    Args:
        helpers: the helpers of hpcddp, each with its use.
        loss_reduction: ``train.loss_reduction`` of a job with the exact loss.
    """

    meaning: str
    helpers: dict[str, str]
    loss_reduction: str = "global"


_ADVICE: Final = {
    Verdict.MEAN: _Advice(
        meaning="It is the mean over the samples: {ranks} ranks train what one process trains.",
        helpers={},
        loss_reduction="mean",
    ),
    Verdict.SUM: _Advice(
        meaning="It is the sum over the samples: DDP averages over ranks, a gradient {ranks} times too small.",
        helpers={"DeclaredLoss": "with reduction=Reduction.SUM, in a loop of your own"},
        loss_reduction="sum",
    ),
    Verdict.WEIGHTED_MEAN: _Advice(
        meaning="It is divided by weights or a count that differ between ranks: {ranks} ranks train another loss "
        "than one.",
        helpers={"weighted_mean": "of the sum over this rank's samples and of what divides it"},
    ),
    Verdict.NOT_DECOMPOSABLE: _Advice(
        meaning="It is no mean of the losses of the shares: {ranks} ranks train another loss than one.",
        helpers={
            "additive_loss": "if it is a function of few sums over samples, such as a ratio or a root",
            "gather_with_grad": "if it compares, sorts or selects samples, or depends on their order",
        },
    ),
}
_SAME_BELOW: Final = 1e-12


def explain(diagnosis: Diagnosis) -> str:
    """Return the diagnosis as text, ending with a newline."""
    judgement = diagnosis.judgement
    deviation = judgement.deviation
    advice = _ADVICE[diagnosis.verdict]
    lines = [
        f"{diagnosis.loss}: {diagnosis.verdict}",
        advice.meaning.format(ranks=len(judgement.ddp.shares)),
        "",
        f"tried in {_dtype_name(diagnosis)} on {judgement.batch.data}: {judgement.batch.describe()}",
        "largest difference from the mean over even, uneven and permuted shares:",
        f"  value {_describe_error(deviation.value)}, gradient {_describe_error(deviation.gradient)}",
    ]
    if diagnosis.verdict is not Verdict.MEAN:
        lines += ["", *_ddp_lines(judgement.ddp), ""]
        lines += [f"use hpcddp.{helper} {use}" for helper, use in advice.helpers.items()]
        lines.append(f"in a job file: train.loss_reduction: {advice.loss_reduction}")
    lines += [f"\nnote: {note}" for note in diagnosis.notes]
    return "\n".join(lines) + "\n"


def _dtype_name(diagnosis: Diagnosis) -> str:
    return str(diagnosis.judgement.dtype).removeprefix("torch.")


def _describe_error(fraction: float) -> str:
    return "same" if fraction < _SAME_BELOW else percent(fraction)


def _ddp_lines(ddp: Ddp) -> list[str]:
    title = f"plain DDP, {len(ddp.shares)} ranks, a global batch of {sum(ddp.shares)}:"
    if math.isinf(ddp.deviation.worst):
        return [title, "  a share's loss is not finite, and so is every gradient"]
    angle = math.degrees(math.acos(max(-1.0, min(1.0, ddp.cosine))))
    gradient = (
        f"  gradient off by {percent(ddp.deviation.gradient)}: its length is {ddp.ratio:.3f} of the right one, "
        f"its direction {angle:.1f} degrees away"
    )
    return [title, gradient, f"  logged loss off by {percent(ddp.deviation.value)}"]


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return the diagnosis as a JSON document."""
    judgement = diagnosis.judgement
    ddp = judgement.ddp
    advice = _ADVICE[diagnosis.verdict]
    return {
        "loss": diagnosis.loss,
        "verdict": diagnosis.verdict.value,
        "defect": diagnosis.verdict is not Verdict.MEAN,
        "tried_on": {
            "data": judgement.batch.data,
            "shapes": judgement.batch.describe(),
            "dtype": _dtype_name(diagnosis),
        },
        "deviation": {
            "value": finite_number(judgement.deviation.value),
            "gradient": finite_number(judgement.deviation.gradient),
        },
        "plain_ddp": {
            "world_size": len(ddp.shares),
            "global_batch_size": sum(ddp.shares),
            "shares": list(ddp.shares),
            "value_error": finite_number(ddp.deviation.value),
            "gradient_error": finite_number(ddp.deviation.gradient),
            "gradient_ratio": finite_number(ddp.ratio),
            "gradient_cosine": finite_number(ddp.cosine),
        },
        "helpers": list(advice.helpers),
        "loss_reduction": advice.loss_reduction,
        "notes": list(diagnosis.notes),
    }
