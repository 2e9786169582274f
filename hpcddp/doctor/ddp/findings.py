"""Derive the findings of a comparison from the reports of one process and of W ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from hpcddp.doctor.ddp.job import Comparison, Report
from hpcddp.doctor.errors import percent
from hpcddp.errors import counted

Severity = Literal["defect", "hidden", "note"]
_SEVERITIES: Final[tuple[Severity, ...]] = get_args(Severity)

# Relative errors by precision: sums in another order differ by less than the first, and one single-precision layer in a
# double-precision model by less than the second.
_TOLERANCES: Final = {"fp64": (1e-9, 1e-5), "fp32": (1e-4, 1e-4)}
# The verdict that the user's loss must have, by its declared reduction.
_DECLARED: Final = {"mean": "MEAN", "sum": "SUM", "per_sample": "MEAN"}
# Findings that explain wrong gradients, so that no other cause is looked for.
_CAUSES_OF_GRADIENTS: Final = ("initialisation_by_world_size", "other_samples", "drift")


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpFinding:
    """One finding of a comparison.

    Args:
        kind: a stable identifier for programs.
        severity: ``defect``: W ranks train differently from one process; ``hidden``: this finding prevents the
            comparison, so that a difference may be hidden; ``note``: information.
        sentence: the observation.
        way_out: what to do; empty if nothing is needed.
    """

    kind: str
    severity: Severity
    sentence: str
    way_out: str


def _defect(kind: str, sentence: str, way_out: str) -> DdpFinding:
    return DdpFinding(kind=kind, severity="defect", sentence=sentence, way_out=way_out)


def _note(kind: str, sentence: str, way_out: str = "") -> DdpFinding:
    return DdpFinding(kind=kind, severity="note", sentence=sentence, way_out=way_out)


def judge(alone: Report, ranks: Sequence[Report], comparison: Comparison) -> list[DdpFinding]:
    """Return all findings in the order of ``Severity``."""
    judges = (_initialisation, _unused, _noise, _samples, _gradients, _drift, _buffers, _batch_norm)
    findings = [finding for find in judges for finding in find(alone, ranks, comparison)]
    if any(finding.kind in _CAUSES_OF_GRADIENTS for finding in findings):
        findings = [finding for finding in findings if finding.kind != "gradient"]
    return sorted(findings, key=lambda finding: _SEVERITIES.index(finding.severity))


def failure(errors: Sequence[Mapping[str, Any]], comparison: Comparison) -> DdpFinding:
    """Return the finding about ranks that failed although one process did not."""
    first = min(errors, key=lambda error: float(error["time"]))
    unused = "no gradient reached" in first["message"]
    return _defect(
        "unused_parameters" if unused else "fails_on_ranks",
        f"One process trains, and {comparison.world_size} ranks do not: {first['message']}.",
        "" if unused else "See where the model or the data use the rank or the number of ranks.",
    )


def worst_error(ranks: Sequence[Report]) -> float | None:
    """Return the largest relative error of a gradient in any step; None if no step was made."""
    errors = [error for step in _steps_of(ranks[0]) for error in _errors_of(step).values()]
    return None if not errors else max(errors, key=_size)


def _initialisation(alone: Report, ranks: Sequence[Report], comparison: Comparison) -> Iterator[DdpFinding]:
    if name := _first_difference(alone["initial"], ranks[0]["initial"]):
        yield _defect(
            "initialisation_by_world_size",
            f"The initial value of {name} differs between {comparison.world_size} ranks and one process.",
            "Initialise parameters with torch's generator only, which is seeded, and without the rank.",
        )
    for report in ranks[1:]:
        if name := _first_difference(ranks[0]["initial"], report["initial"]):
            yield _note(
                "initialisation_by_rank",
                f"The initial value of {name} on rank {report['rank']} is not that of rank 0.",
                "DDP copies parameters and buffers of rank 0, and nothing else: no random number of the "
                "model may depend on the rank.",
            )
            return


def _unused(_: Report, ranks: Sequence[Report], __: Comparison) -> Iterator[DdpFinding]:
    for report in ranks:
        only = sorted(
            set(report["unused"]) - set(ranks[0]["unused"]) or set(ranks[0]["unused"]) - set(report["unused"])
        )
        if only:
            is_allowed = ranks[0]["finds_unused"]
            yield DdpFinding(
                kind="unused_on_some_ranks",
                severity="note" if is_allowed else "defect",
                sentence=f"{_named(only)} gets a gradient on some ranks only: rank {report['rank']} and rank 0 differ"
                + (" on the same samples." if is_allowed else "; DDP waits for the others indefinitely."),
                way_out="Use every parameter on every rank"
                + ("." if is_allowed else ", or give the model an attribute find_unused_parameters = True."),
            )
            return
    if ranks[0]["unused"]:
        yield _note(
            "unused_parameters",
            f"No gradient reaches {_named(ranks[0]['unused'])}, on any rank; DDP searches for such parameters "
            "in every step.",
            "Leave them out, or set requires_grad to False.",
        )


def _noise(_: Report, ranks: Sequence[Report], comparison: Comparison) -> Iterator[DdpFinding]:
    noise = ranks[0]["noise"]
    if not noise["repeats"]:
        yield _note(
            "unseeded_noise",
            "The model draws random numbers that torch's seed does not determine: a rerun draws others.",
            "Draw from torch's default generator, which hpcddp seeds with seed, step and rank.",
        )
    if not noise["random"]:
        return
    different = (len({report["noise"][trace] for report in ranks}) for trace in ("masks", "generator"))
    if min(different) < len(ranks):
        yield _defect(
            "same_masks",
            "Ranks draw the same random numbers in the forward: their dropout masks do not differ.",
            "Do not seed torch in the model, and use no generator of its own: hpcddp seeds torch's with "
            "seed, step and rank.",
        )
    else:
        yield _note(
            "dropout",
            "Dropout masks differ between ranks, as they should; dropout was off during the comparison.",
        )
    if not noise["only_dropout"]:
        yield DdpFinding(
            kind="own_noise",
            severity="hidden" if _gradients_differ(ranks, comparison) else "note",
            sentence="The model draws random numbers other than dropout; gradients differ because of them, and "
            "other differences cannot be seen.",
            way_out="Run the comparison with these random numbers switched off.",
        )


def _samples(alone: Report, ranks: Sequence[Report], _: Comparison) -> Iterator[DdpFinding]:
    for number, step in enumerate(_steps_of(alone) if _steps_of(ranks[0]) else ()):
        # Ranks with fewer samples than the one process may make fewer steps.
        others = [
            sample for report in ranks for made in _steps_of(report)[number : number + 1] for sample in made["samples"]
        ]
        if len(others) != len(step["samples"]):
            different = abs(len(others) - len(step["samples"]))
        else:
            different = sum(one != other for one, other in zip(step["samples"], others, strict=True))
        if different:
            yield _defect(
                "other_samples",
                f"{different} of {len(step['samples'])} samples of step {number + 1} are not those of one "
                "process: the data set returns other samples on other ranks.",
                "A sample must depend on its index only: do not shuffle, shard or draw by rank in a data set.",
            )
            return


def _gradients(alone: Report, ranks: Sequence[Report], comparison: Comparison) -> Iterator[DdpFinding]:
    """Yield the causes of wrong gradients in the first step that has some; later errors follow from it."""
    exact, single = _TOLERANCES[comparison.precision]
    noisy = not ranks[0]["noise"]["only_dropout"]
    for number, step in enumerate(_steps_of(ranks[0])):
        wrong = {name: error for name, error in _errors_of(step).items() if not error <= single}
        if not wrong:
            continue
        if not noisy:
            yield from _causes(number, step["gradients"], wrong, alone, comparison)
        return
    if _steps_of(ranks[0]) and (declaration := _declaration(alone, comparison)) is not None:
        kind, sentence, way_out = declaration
        yield _defect(
            kind,
            f"{sentence} on random outputs and labels, though the samples of these steps do not show it.",
            way_out,
        )
    error = worst_error(ranks)
    if error is not None and error > exact and not noisy:
        yield _note(
            "single_precision",
            f"Gradients differ by {error:.0e}: a part of the model computes in single precision.",
        )


def _causes(
    step: int,
    gradients: Mapping[str, Mapping[str, float]],
    wrong: Mapping[str, float],
    alone: Report,
    comparison: Comparison,
) -> Iterator[DdpFinding]:
    if (loss := _loss_finding(step, wrong, alone, comparison)) is not None:
        yield loss
        return
    ranks = comparison.world_size
    small = [name for name in wrong if _is_multiple(gradients[name], 1 / ranks, comparison)]
    large = [name for name in wrong if _is_multiple(gradients[name], ranks, comparison)]
    rest = [name for name in wrong if name not in small and name not in large]
    if small:
        yield _defect(
            "gradient_divided",
            f"The gradient of {_named(small)} is {1 / ranks:.3g} of the right one at {ranks} ranks: it is "
            "divided by the number of ranks twice, as behind a gather without gradient.",
            "Gather with hpcddp.gather_with_grad, and do not divide by the number of ranks: DDP does.",
        )
    if large:
        yield _defect(
            "gradient_multiplied",
            f"The gradient of {_named(large)} is {ranks} times the right one at {ranks} ranks: it is scaled "
            "by the number of ranks twice.",
            "Do not multiply by the number of ranks, nor sum gradients that DDP averages already.",
        )
    if rest:
        yield _other_cause(step, gradients, {name: wrong[name] for name in rest}, alone, comparison)


def _loss_finding(step: int, wrong: Mapping[str, float], alone: Report, comparison: Comparison) -> DdpFinding | None:
    """Return the finding about the user's loss; None if its reduction is declared correctly."""
    if (declaration := _declaration(alone, comparison)) is None:
        return None
    kind, sentence, way_out = declaration
    return _defect(
        kind,
        f"{sentence}: the gradient of {_worst_first(wrong)} is off by {percent(_worst(wrong))} in step {step + 1}.",
        way_out,
    )


def _declaration(alone: Report, comparison: Comparison) -> tuple[str, str, str] | None:
    """Return kind, sentence and way out for a loss with a wrong reduction; None if it is declared correctly."""
    train = comparison.job.train
    verdict = alone["loss"]
    if train is None or verdict is None or verdict == _DECLARED[train.loss_reduction]:
        return None
    sentence = f"train.loss {train.loss} is declared {train.loss_reduction}, and it is {verdict}"
    fitting = next((name for name, declared in _DECLARED.items() if declared == verdict), None)
    if fitting is not None:
        return "loss_declared_otherwise", sentence, f"Write train.loss_reduction: {fitting}."
    helper = f"hpcddp doctor loss {train.loss} names the helper that repairs it"
    return "loss_not_decomposable", sentence, f"{helper}; with that, train.loss_reduction is global."


def _is_multiple(gradient: Mapping[str, float], factor: float, comparison: Comparison) -> bool:
    single = _TOLERANCES[comparison.precision][1]
    return abs(gradient["ratio"] / factor - 1) <= single and gradient["rest"] <= single * max(1.0, factor)


def _other_cause(
    step: int,
    gradients: Mapping[str, Mapping[str, float]],
    wrong: Mapping[str, float],
    alone: Report,
    comparison: Comparison,
) -> DdpFinding:
    worst = max(wrong, key=lambda name: _size(wrong[name]))
    seen = f"The gradient of {_worst_first(wrong)}"
    seen += f" is off by {percent(wrong[worst])} in step {step + 1}"
    if alone["noise"]["mixes_samples"] and not alone["batch_norm"]["sync"]:
        return _defect(
            "samples_mixed",
            f"{seen}: the output for a sample depends on the samples beside it, and a rank sees its own samples only.",
            "Take statistics per sample (LayerNorm, GroupNorm), or over all ranks (train.batch_norm: sync; "
            "others of your own with hpcddp.gather_with_grad).",
        )
    ratio = gradients[worst]["ratio"]
    length = "" if math.isnan(ratio) else f"; its component along the right one is {ratio:.4g} times as long"
    train = comparison.job.train
    loss = None if train is None else train.loss
    where = "the model" if loss is None else f"the loss {loss}, then in the model,"
    return _defect(
        "gradient",
        f"{seen}{length}.",
        f"Look in {where} for what depends on the rank, the number of ranks or the size of a micro-batch.",
    )


def _drift(_: Report, ranks: Sequence[Report], __: Comparison) -> Iterator[DdpFinding]:
    for number, step in enumerate(_steps_of(ranks[0])):
        for report in ranks[1:]:
            if name := _first_difference(step["parameters"], _steps_of(report)[number]["parameters"]):
                yield _defect(
                    "drift",
                    f"After step {number + 1} parameter {name} on rank {report['rank']} is not that of rank "
                    "0: the replicas diverge.",
                    "Only the optimizer may change parameters, and nothing in it may depend on the rank.",
                )
                return


def _buffers(_: Report, ranks: Sequence[Report], __: Comparison) -> Iterator[DdpFinding]:
    for report in ranks[1:]:
        for first, other in zip(_steps_of(ranks[0]), _steps_of(report), strict=True):
            if name := _first_difference(first["buffers"], other["buffers"]):
                yield _note(
                    "buffers",
                    f"Buffer {name} on rank {report['rank']} is not that of rank 0; evaluations and "
                    "checkpoints take rank 0's.",
                    "All-reduce the sums that the model takes over samples.",
                )
                return


def _batch_norm(alone: Report, ranks: Sequence[Report], comparison: Comparison) -> Iterator[DdpFinding]:
    layers = alone["batch_norm"]["local"]
    live = ranks[0].get("observed", {}).get("batch_statistics")
    if not layers or live is None:
        return
    smallest = min(comparison.plan.micro_batch_sizes(comparison.global_batch_size))
    error = max(_errors_of(live["steps"][0]).values(), default=0.0)
    yield _note(
        "ghost_batch_norm",
        f"BatchNorm ({counted(layers, 'layer')}) takes its statistics over micro-batches of "
        f"{smallest} samples or more, and one process over {comparison.global_batch_size}: that alone changes "
        f"gradients by {percent(error)}.",
        "Its statistics were fixed for the comparison. For statistics over all ranks: train.batch_norm: sync.",
    )


def _steps_of(report: Report) -> Sequence[Mapping[str, Any]]:
    """Return a rank's report of each step; empty if no step was made."""
    steps: Sequence[Mapping[str, Any]] = report.get("observed", {}).get("fixed_statistics", {}).get("steps", ())
    return steps


def _errors_of(step: Mapping[str, Any]) -> dict[str, float]:
    """Return the relative error of every parameter's gradient."""
    return {name: float(gradient["error"]) for name, gradient in (step["gradients"] or {}).items()}


def _gradients_differ(ranks: Sequence[Report], comparison: Comparison) -> bool:
    """Return whether a gradient in any step differs from that of one process."""
    _, single = _TOLERANCES[comparison.precision]
    return any(not error <= single for step in _steps_of(ranks[0]) for error in _errors_of(step).values())


def _worst_first(wrong: Mapping[str, float]) -> str:
    """Return the names of the parameters, the one with the largest error first."""
    return _named(sorted(wrong, key=lambda name: _size(wrong[name]), reverse=True))


def _worst(wrong: Mapping[str, float]) -> float:
    return max(wrong.values(), key=_size)


def _size(error: float) -> float:
    """Return the error as a sort key; NaN is the largest."""
    return math.inf if math.isnan(error) else error


def _named(names: Sequence[str]) -> str:
    """Return the first name and the number of other names."""
    others = len(names) - 1
    if others == 0:
        return names[0]
    return f"{names[0]} and {counted(others, 'more parameter')}"


def _first_difference(first: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    return next((name for name, value in first.items() if other.get(name) != value), None)
