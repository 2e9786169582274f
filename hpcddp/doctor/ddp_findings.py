"""From what one process and W ranks reported to what is wrong, and why."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from hpcddp.doctor.ddp_job import Comparison
from hpcddp.doctor.ddp_processes import Report

Severity = Literal["defect", "note"]

# Sums in another order differ by less than the first; one single-precision layer in a double-precision model by less
# than the second.
TOLERANCES: Final = {"fp64": (1e-9, 1e-5), "fp32": (1e-4, 1e-4)}
_EXPLAIN_GRADIENTS: Final = ("initialisation_by_world_size", "other_samples", "drift")
_ROUNDS_TO_ZERO: Final = 5e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpFinding:
    """One thing that was found.

    Args:
        kind: a stable word for programs.
        severity: ``defect``: W ranks train something else than one process; ``note``: good to know.
        sentence: what was seen.
        way_out: what to do; empty where nothing needs doing.
    """

    kind: str
    severity: Severity
    sentence: str
    way_out: str


def failure(errors: Sequence[Mapping[str, Any]], comparison: Comparison) -> DdpFinding:
    """Return what is to be said of ranks that failed where one process did not.

    Args:
        errors: the ``error`` of each rank that has one.
        comparison: what is compared.
    """
    first = min(errors, key=lambda error: float(error["time"]))
    unused = "no gradient reached" in first["message"]
    return DdpFinding(
        kind="unused_parameters" if unused else "fails_on_ranks",
        severity="defect",
        sentence=f"One process trains, and {comparison.world_size} ranks do not: {first['message']}.",
        way_out="" if unused else "See what the model or the data do with the rank or the number of ranks.",
    )


def judge(alone: Report, ranks: Sequence[Report], comparison: Comparison) -> list[DdpFinding]:
    """Return everything that was found, defects first.

    Args:
        alone: what the one process reported.
        ranks: what the W ranks reported, by rank.
        comparison: what is compared.
    """
    judges = (_initialisation, _unused, _noise, _samples, _gradients, _drift, _buffers, _batch_norm)
    found = [finding for find in judges for finding in find(alone, ranks, comparison)]
    if any(finding.kind in _EXPLAIN_GRADIENTS for finding in found):
        found = [finding for finding in found if finding.kind != "gradient"]
    return sorted(found, key=lambda finding: finding.severity)


def worst_error(ranks: Sequence[Report]) -> float | None:
    """Return the largest relative error of a gradient in any step; None where no step was made."""
    errors = [error for step in _steps(ranks[0]) for error in _errors(step).values()]
    return None if not errors else max(errors, key=lambda error: math.inf if math.isnan(error) else error)


def _initialisation(alone: Report, ranks: Sequence[Report], comparison: Comparison) -> Iterator[DdpFinding]:
    if name := _first_difference(alone["initial"], ranks[0]["initial"]):
        yield DdpFinding(
            kind="initialisation_by_world_size",
            severity="defect",
            sentence=f"The first value of {name} is another one on {comparison.world_size} ranks than in one process.",
            way_out="Draw first weights from torch's generator alone, which is seeded, and never ask for the rank.",
        )
    for report in ranks[1:]:
        if name := _first_difference(ranks[0]["initial"], report["initial"]):
            yield DdpFinding(
                kind="initialisation_by_rank",
                severity="note",
                sentence=f"The first value of {name} on rank {report['rank']} is not that of rank 0.",
                way_out="DDP takes rank 0's parameters and buffers, and nothing else: let nothing that the model "
                "draws depend on the rank.",
            )
            return


def _unused(_: Report, ranks: Sequence[Report], __: Comparison) -> Iterator[DdpFinding]:
    for report in ranks:
        only = sorted(
            set(report["unused"]) - set(ranks[0]["unused"]) or set(ranks[0]["unused"]) - set(report["unused"])
        )
        if only:
            known = ranks[0]["finds_unused"]
            yield DdpFinding(
                kind="unused_on_some_ranks",
                severity="note" if known else "defect",
                sentence=f"{_named(only)} gets a gradient on some ranks only: rank {report['rank']} and rank 0 differ"
                + (" on the same samples." if known else "; DDP waits for the others for ever."),
                way_out="Use every parameter on every rank"
                + ("." if known else ", or give the model an attribute find_unused_parameters = True."),
            )
            return
    if ranks[0]["unused"]:
        yield DdpFinding(
            kind="unused_parameters",
            severity="note",
            sentence=f"No gradient reaches {_named(ranks[0]['unused'])}, on any rank; DDP looks for it in every step.",
            way_out="Leave them out, or set requires_grad to False.",
        )


def _noise(_: Report, ranks: Sequence[Report], __: Comparison) -> Iterator[DdpFinding]:
    noise = ranks[0]["noise"]
    if not noise["repeats"]:
        yield DdpFinding(
            kind="unseeded_noise",
            severity="note",
            sentence="The model draws random numbers that torch's seed does not reach: a rerun draws others.",
            way_out="Draw from torch's own generator, which is seeded by seed, step and rank.",
        )
    if not noise["random"]:
        return
    different = (len({report["noise"][trace] for report in ranks}) for trace in ("masks", "generator"))
    if min(different) < len(ranks):
        yield DdpFinding(
            kind="same_masks",
            severity="defect",
            sentence="Ranks draw the same random numbers in the forward: their dropout masks do not differ.",
            way_out="Do not seed torch in the model: hpcddp seeds every step by seed, step and rank.",
        )
    else:
        yield DdpFinding(
            kind="dropout",
            severity="note",
            sentence="Dropout masks differ between ranks, as they should; they were off for the comparison.",
            way_out="",
        )
    if not noise["quiet"]:
        yield DdpFinding(
            kind="own_noise",
            severity="note",
            sentence="The model draws random numbers beside dropout, so that gradients differ by them.",
            way_out="Look at the model with them off.",
        )


def _samples(alone: Report, ranks: Sequence[Report], _: Comparison) -> Iterator[DdpFinding]:
    for number, step in enumerate(_steps(alone) if _steps(ranks[0]) else ()):
        others = [sample for report in ranks for sample in _steps(report)[number]["samples"]]
        if len(others) != len(step["samples"]):
            different = abs(len(others) - len(step["samples"]))
        else:
            different = sum(one != other for one, other in zip(step["samples"], others, strict=True))
        if different:
            yield DdpFinding(
                kind="other_samples",
                severity="defect",
                sentence=f"{different} of {len(step['samples'])} samples of step {number + 1} are not those of one "
                "process: the data set gives other ones on other ranks.",
                way_out="Let a sample follow from its index alone; never shuffle, shard or draw by rank in a data set.",
            )
            return


def _gradients(alone: Report, ranks: Sequence[Report], comparison: Comparison) -> Iterator[DdpFinding]:
    """Yield why gradients are wrong, at the first step where they are: what comes after follows from it."""
    exact, single = TOLERANCES[comparison.precision]
    noisy = not ranks[0]["noise"]["quiet"]
    for number, step in enumerate(_steps(ranks[0])):
        wrong = {name: error for name, error in _errors(step).items() if not error <= single}
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
    ranks = comparison.world_size
    small = [name for name in wrong if _is_multiple(gradients[name], 1 / ranks, comparison)]
    large = [name for name in wrong if _is_multiple(gradients[name], ranks, comparison)]
    rest = [name for name in wrong if name not in small and name not in large]
    if small:
        yield DdpFinding(
            kind="gradient_divided",
            severity="defect",
            sentence=f"The gradient of {_named(small)} is {1 / ranks:.3g} of the right one at {ranks} ranks: it is "
            "divided by the number of ranks twice, as behind a gather without gradient.",
            way_out="Gather with hpcddp.gather_with_grad, and do not divide by the number of ranks: DDP does.",
        )
    if large:
        yield DdpFinding(
            kind="gradient_multiplied",
            severity="defect",
            sentence=f"The gradient of {_named(large)} is {ranks} times the right one at {ranks} ranks: it is scaled "
            "by the number of ranks twice.",
            way_out="Do not multiply by the number of ranks, nor sum gradients that DDP averages already.",
        )
    if rest:
        yield _other_cause(step, gradients, {name: wrong[name] for name in rest}, alone)


def _is_multiple(gradient: Mapping[str, float], factor: float, comparison: Comparison) -> bool:
    single = TOLERANCES[comparison.precision][1]
    return abs(gradient["ratio"] / factor - 1) <= single and gradient["rest"] <= single * max(1.0, factor)


def _other_cause(
    step: int, gradients: Mapping[str, Mapping[str, float]], wrong: Mapping[str, float], alone: Report
) -> DdpFinding:
    worst = max(wrong, key=lambda name: math.inf if math.isnan(wrong[name]) else wrong[name])
    seen = f"The gradient of {_named([worst, *(name for name in wrong if name != worst)])}"
    seen += f" is off by {percent(wrong[worst])} in step {step + 1}"
    if alone["noise"]["mixes"] and not alone["batch_norm"]["sync"]:
        return DdpFinding(
            kind="samples_mixed",
            severity="defect",
            sentence=f"{seen}: the output for a sample depends on the samples beside it, and a rank sees its own only.",
            way_out="Take statistics per sample (LayerNorm, GroupNorm), or over all ranks (batch_norm: sync).",
        )
    ratio = gradients[worst]["ratio"]
    length = "" if math.isnan(ratio) else f"; along the right one it is {ratio:.4g} times as long"
    return DdpFinding(
        kind="gradient",
        severity="defect",
        sentence=f"{seen}{length}.",
        way_out="Look for what depends on the rank, the number of ranks or the size of a micro-batch in the model.",
    )


def _drift(_: Report, ranks: Sequence[Report], __: Comparison) -> Iterator[DdpFinding]:
    for number, step in enumerate(_steps(ranks[0])):
        for report in ranks[1:]:
            if name := _first_difference(step["parameters"], _steps(report)[number]["parameters"]):
                yield DdpFinding(
                    kind="drift",
                    severity="defect",
                    sentence=f"After step {number + 1} parameter {name} on rank {report['rank']} is not that of rank "
                    "0: the replicas drift apart.",
                    way_out="Let nothing but the optimizer change parameters, and nothing that depends on the rank.",
                )
                return


def _buffers(_: Report, ranks: Sequence[Report], __: Comparison) -> Iterator[DdpFinding]:
    for report in ranks[1:]:
        for first, other in zip(_steps(ranks[0]), _steps(report), strict=True):
            if name := _first_difference(first["buffers"], other["buffers"]):
                yield DdpFinding(
                    kind="buffers",
                    severity="note",
                    sentence=f"Buffer {name} on rank {report['rank']} is not that of rank 0; evaluations and "
                    "checkpoints take rank 0's.",
                    way_out="All-reduce what the model adds up over samples.",
                )
                return


def _batch_norm(alone: Report, ranks: Sequence[Report], comparison: Comparison) -> Iterator[DdpFinding]:
    layers, live = alone["batch_norm"]["local"], ranks[0].get("looks", {}).get("live")
    if not layers or live is None:
        return
    smallest = comparison.global_batch_size // (comparison.world_size * comparison.grad_accum_steps)
    error = max(_errors(live["steps"][0]).values(), default=0.0)
    yield DdpFinding(
        kind="ghost_batch_norm",
        severity="note",
        sentence=f"BatchNorm ({layers} layers) takes statistics of the {smallest} samples or more of a micro-batch, "
        f"one process of {comparison.global_batch_size}: that alone changes gradients by {percent(error)}.",
        way_out="It was held still for the comparison. For one batch over all ranks: train.batch_norm: sync.",
    )


def _steps(report: Report) -> Sequence[Mapping[str, Any]]:
    steps: Sequence[Mapping[str, Any]] = report.get("looks", {}).get("exact", {}).get("steps", ())
    return steps


def _errors(step: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(gradient["error"]) for name, gradient in (step["gradients"] or {}).items()}


def _first_difference(one: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    return next((name for name, value in one.items() if other.get(name) != value), None)


def _named(names: Sequence[str]) -> str:
    others = len(names) - 1
    return names[0] + ("" if not others else f" and {others} more parameter{'s' if others > 1 else ''}")


def percent(fraction: float) -> str:
    """Return a fraction as percent with two digits, or in words where that says more."""
    if math.isnan(fraction):
        return "NaN"
    if fraction < _ROUNDS_TO_ZERO:
        return f"{fraction:.0e}" if fraction else "0"
    return f"{100 * fraction:.2g} %" if fraction < 1 else f"{100 * fraction:,.0f} %"
