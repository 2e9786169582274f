"""Why the averaged gradient of W ranks is not that of one process."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from hpcddp.doctor.ddp_finding import DdpFinding, errors_of, named, steps_of
from hpcddp.doctor.ddp_job import Comparison
from hpcddp.doctor.ddp_processes import Report
from hpcddp.doctor.wording import percent

# Sums in another order differ by less than the first; one single-precision layer in a double-precision model by less
# than the second.
TOLERANCES: Final = {"fp64": (1e-9, 1e-5), "fp32": (1e-4, 1e-4)}
# What a loss of the user's own must be, by its declaration.
_DECLARED: Final = {"mean": "MEAN", "sum": "SUM", "per_sample": "MEAN"}


def worst_error(ranks: Sequence[Report]) -> float | None:
    """Return the largest relative error of a gradient in any step; None where no step was made."""
    errors = [error for step in steps_of(ranks[0]) for error in errors_of(step).values()]
    return None if not errors else max(errors, key=_size)


def judge_gradients(alone: Report, ranks: Sequence[Report], comparison: Comparison) -> Iterator[DdpFinding]:
    """Yield why gradients are wrong, at the first step where they are: what comes after follows from it."""
    exact, single = TOLERANCES[comparison.precision]
    noisy = not ranks[0]["noise"]["quiet"]
    for number, step in enumerate(steps_of(ranks[0])):
        wrong = {name: error for name, error in errors_of(step).items() if not error <= single}
        if not wrong:
            continue
        if not noisy:
            yield from _causes(number, step["gradients"], wrong, alone, comparison)
        return
    error = worst_error(ranks)
    if error is not None and error > exact and not noisy:
        yield DdpFinding(
            kind="single_precision",
            severity="note",
            sentence=f"Gradients differ by {error:.0e}: a part of the model computes in single precision.",
            way_out="",
        )


def _causes(
    step: int,
    gradients: Mapping[str, Mapping[str, float]],
    wrong: Mapping[str, float],
    alone: Report,
    comparison: Comparison,
) -> Iterator[DdpFinding]:
    if (loss := _loss(step, wrong, alone, comparison)) is not None:
        yield loss
        return
    ranks = comparison.world_size
    small = [name for name in wrong if _is_multiple(gradients[name], 1 / ranks, comparison)]
    large = [name for name in wrong if _is_multiple(gradients[name], ranks, comparison)]
    rest = [name for name in wrong if name not in small and name not in large]
    if small:
        yield DdpFinding(
            kind="gradient_divided",
            severity="defect",
            sentence=f"The gradient of {named(small)} is {1 / ranks:.3g} of the right one at {ranks} ranks: it is "
            "divided by the number of ranks twice, as behind a gather without gradient.",
            way_out="Gather with hpcddp.gather_with_grad, and do not divide by the number of ranks: DDP does.",
        )
    if large:
        yield DdpFinding(
            kind="gradient_multiplied",
            severity="defect",
            sentence=f"The gradient of {named(large)} is {ranks} times the right one at {ranks} ranks: it is scaled "
            "by the number of ranks twice.",
            way_out="Do not multiply by the number of ranks, nor sum gradients that DDP averages already.",
        )
    if rest:
        yield _other_cause(step, gradients, {name: wrong[name] for name in rest}, alone)


def _loss(step: int, wrong: Mapping[str, float], alone: Report, comparison: Comparison) -> DdpFinding | None:
    """Return what is wrong with a loss of the user's own; None where it is what it is declared."""
    train, verdict = comparison.job.train, alone["loss"]
    if train is None or verdict is None or verdict == _DECLARED[train.loss_reduction]:
        return None
    fitting = next((name for name, declared in _DECLARED.items() if declared == verdict), None)
    way_out = (
        f"hpcddp doctor loss {train.loss} names the helper that repairs it; with that, train.loss_reduction is global."
        if fitting is None
        else f"Write train.loss_reduction: {fitting}."
    )
    return DdpFinding(
        kind="loss_not_decomposable" if fitting is None else "loss_declared_otherwise",
        severity="defect",
        sentence=f"train.loss {train.loss} is declared {train.loss_reduction}, and it is {verdict}: the gradient of "
        f"{_worst_first(wrong)} is off by {percent(_worst(wrong))} in step {step + 1}.",
        way_out=way_out,
    )


def _worst_first(wrong: Mapping[str, float]) -> str:
    """Return the parameters, the one that is farthest off first."""
    return named(sorted(wrong, key=lambda name: _size(wrong[name]), reverse=True))


def _worst(wrong: Mapping[str, float]) -> float:
    return max(wrong.values(), key=_size)


def _size(error: float) -> float:
    """Return the error; what is no number is the worst."""
    return math.inf if math.isnan(error) else error


def _is_multiple(gradient: Mapping[str, float], factor: float, comparison: Comparison) -> bool:
    single = TOLERANCES[comparison.precision][1]
    return abs(gradient["ratio"] / factor - 1) <= single and gradient["rest"] <= single * max(1.0, factor)


def _other_cause(
    step: int, gradients: Mapping[str, Mapping[str, float]], wrong: Mapping[str, float], alone: Report
) -> DdpFinding:
    worst = max(wrong, key=lambda name: _size(wrong[name]))
    seen = f"The gradient of {_worst_first(wrong)}"
    seen += f" is off by {percent(wrong[worst])} in step {step + 1}"
    if alone["noise"]["mixes"] and not alone["batch_norm"]["sync"]:
        return DdpFinding(
            kind="samples_mixed",
            severity="defect",
            sentence=f"{seen}: the output for a sample depends on the samples beside it, and a rank sees its own only.",
            way_out="Take statistics per sample (LayerNorm, GroupNorm), or over all ranks (train.batch_norm: sync; "
            "others of your own with hpcddp.gather_with_grad).",
        )
    ratio = gradients[worst]["ratio"]
    length = "" if math.isnan(ratio) else f"; along the right one it is {ratio:.4g} times as long"
    return DdpFinding(
        kind="gradient",
        severity="defect",
        sentence=f"{seen}{length}.",
        way_out="Look for what depends on the rank, the number of ranks or the size of a micro-batch in the model.",
    )
