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
# Findings that explain wrong gradients, so that no other cause is looked for.
_CAUSES_OF_GRADIENTS: Final = ("initialisation_by_world_size", "other_samples", "drift")


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpFinding:
    """One finding of a comparison.

    Args:
        kind: a stable identifier for programs.
        severity: ``defect``: W ranks train differently from one process; ``hidden``: this finding prevents the
            comparison, so that a difference may be hidden; ``note``: information.
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
    findings = [
        *_judge_initialisation(alone, ranks, comparison),
        *_judge_unused_parameters(ranks),
        *_judge_noise(ranks, comparison),
        *_judge_samples(alone, ranks),
        *_judge_gradients(alone, ranks, comparison),
        *_judge_drift(ranks),
        *_judge_buffers(ranks),
        *_judge_batch_norm(alone, ranks, comparison),
    ]
    if any(finding.kind in _CAUSES_OF_GRADIENTS for finding in findings):
        findings = [finding for finding in findings if finding.kind != "gradient"]
    return sorted(findings, key=lambda finding: _SEVERITIES.index(finding.severity))


def failure(errors: Sequence[Mapping[str, Any]], comparison: Comparison) -> DdpFinding:
    """Return the finding about ranks that failed although one process did not."""
    first = min(errors, key=lambda error: float(error["time"]))
    sentence = f"One process trains, and {comparison.world_size} ranks do not: {first['message']}."
    if "no gradient reached" in first["message"]:
        # The message itself says what to do.
        return _defect("unused_parameters", sentence, "")
    way_out = "See where the model or the data use the rank or the number of ranks."
    return _defect("fails_on_ranks", sentence, way_out)


def worst_error(ranks: Sequence[Report]) -> float | None:
    """Return the largest relative error of a gradient in any step; None if no step was made."""
    errors: list[float] = []
    for step in _steps_of(ranks[0]):
        errors += _errors_of(step).values()
    return max(errors, key=_size) if errors else None


def _judge_initialisation(alone: Report, ranks: Sequence[Report], comparison: Comparison) -> Iterator[DdpFinding]:
    name = _first_difference(alone["initial"], ranks[0]["initial"])
    if name is not None:
        yield _defect(
            "initialisation_by_world_size",
            f"The initial value of {name} differs between {comparison.world_size} ranks and one process.",
            "Initialise parameters with torch's generator only, which is seeded, and without the rank.",
        )
    for report in ranks[1:]:
        name = _first_difference(ranks[0]["initial"], report["initial"])
        if name is not None:
            yield _note(
                "initialisation_by_rank",
                f"The initial value of {name} on rank {report['rank']} is not that of rank 0.",
                "DDP copies parameters and buffers of rank 0, and nothing else: no random number of the "
                "model may depend on the rank.",
            )
            return


def _judge_unused_parameters(ranks: Sequence[Report]) -> Iterator[DdpFinding]:
    unused = set(ranks[0]["unused"])
    other_rank = next((report for report in ranks if set(report["unused"]) != unused), None)
    if other_rank is None:
        if unused:
            yield _note(
                "unused_parameters",
                f"No gradient reaches {_named(ranks[0]['unused'])}, on any rank; DDP searches for such parameters "
                "in every step.",
                "Leave them out, or set requires_grad to False.",
            )
        return
    different_names = set(other_rank["unused"]) - unused
    if not different_names:
        different_names = unused - set(other_rank["unused"])
    names = _named(sorted(different_names))
    sentence = f"{names} gets a gradient on some ranks only: rank {other_rank['rank']} and rank 0 differ"
    if ranks[0]["finds_unused"]:
        yield _note(
            "unused_on_some_ranks",
            f"{sentence} on the same samples.",
            "Use every parameter on every rank.",
        )
    else:
        yield _defect(
            "unused_on_some_ranks",
            f"{sentence}; DDP waits for the others indefinitely.",
            "Use every parameter on every rank, or give the model an attribute find_unused_parameters = True.",
        )


def _judge_noise(ranks: Sequence[Report], comparison: Comparison) -> Iterator[DdpFinding]:
    noise = ranks[0]["noise"]
    if not noise["repeats"]:
        yield _note(
            "unseeded_noise",
            "The model draws random numbers that torch's seed does not determine: a rerun draws others.",
            "Draw from torch's default generator, which hpcddp seeds with seed, step and rank.",
        )
    if not noise["random"]:
        return
    masks = {report["noise"]["masks"] for report in ranks}
    generators = {report["noise"]["generator"] for report in ranks}
    if len(masks) == len(ranks) and len(generators) == len(ranks):
        yield _note(
            "dropout",
            "Dropout masks differ between ranks, as they should; dropout was off during the comparison.",
        )
    else:
        yield _defect(
            "same_masks",
            "Ranks draw the same random numbers in the forward: their dropout masks do not differ.",
            "Do not seed torch in the model, and use no generator of its own: hpcddp seeds torch's with "
            "seed, step and rank.",
        )
    if noise["only_dropout"]:
        return
    severity: Severity = "note"
    if any(_wrong_gradients(step, comparison) for step in _steps_of(ranks[0])):
        severity = "hidden"
    yield DdpFinding(
        kind="own_noise",
        severity=severity,
        sentence="The model draws random numbers other than dropout; gradients differ because of them, and "
        "other differences cannot be seen.",
        way_out="Run the comparison with these random numbers switched off.",
    )


def _judge_samples(alone: Report, ranks: Sequence[Report]) -> Iterator[DdpFinding]:
    if not _steps_of(ranks[0]):
        return
    for number, step in enumerate(_steps_of(alone)):
        different = _count_different(step["samples"], _samples_of_ranks(ranks, number))
        if different:
            yield _defect(
                "other_samples",
                f"{different} of {len(step['samples'])} samples of step {number + 1} are not those of one "
                "process: the data set returns other samples on other ranks.",
                "A sample must depend on its index only: do not shuffle, shard or draw by rank in a data set.",
            )
            return


def _samples_of_ranks(ranks: Sequence[Report], number: int) -> list[str]:
    """Return the samples of a step, in the order of the ranks."""
    samples: list[str] = []
    for report in ranks:
        steps = _steps_of(report)
        # Ranks with fewer samples than the one process may make fewer steps.
        if number < len(steps):
            samples += steps[number]["samples"]
    return samples


def _count_different(samples: Sequence[str], others: Sequence[str]) -> int:
    if len(others) != len(samples):
        return abs(len(others) - len(samples))
    return sum(sample != other for sample, other in zip(samples, others, strict=True))


def _judge_gradients(alone: Report, ranks: Sequence[Report], comparison: Comparison) -> Iterator[DdpFinding]:
    """Yield the causes of wrong gradients in the first step that has some; later errors follow from it."""
    exact, _ = _TOLERANCES[comparison.precision]
    is_noisy = not ranks[0]["noise"]["only_dropout"]
    for number, step in enumerate(_steps_of(ranks[0])):
        wrong = _wrong_gradients(step, comparison)
        if wrong:
            if not is_noisy:
                yield from _causes(number, step["gradients"], wrong, alone, comparison)
            return
    error = worst_error(ranks)
    if error is not None and error > exact and not is_noisy:
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
    ranks = comparison.world_size
    divided = []
    multiplied = []
    other_errors = {}
    for name, error in wrong.items():
        if _is_multiple(gradients[name], 1 / ranks, comparison):
            divided.append(name)
        elif _is_multiple(gradients[name], ranks, comparison):
            multiplied.append(name)
        else:
            other_errors[name] = error
    if divided:
        yield _defect(
            "gradient_divided",
            f"The gradient of {_named(divided)} is {1 / ranks:.3g} of the right one at {ranks} ranks: it is "
            "divided by the number of ranks twice, as behind a gather without gradient.",
            "Gather with hpcddp.gather_with_grad, and do not divide by the number of ranks: DDP does.",
        )
    if multiplied:
        yield _defect(
            "gradient_multiplied",
            f"The gradient of {_named(multiplied)} is {ranks} times the right one at {ranks} ranks: it is scaled "
            "by the number of ranks twice.",
            "Do not multiply by the number of ranks, nor sum gradients that DDP averages already.",
        )
    if other_errors:
        yield _other_cause(step, gradients, other_errors, alone, comparison)


def _is_multiple(gradient: Mapping[str, float], factor: float, comparison: Comparison) -> bool:
    """Return whether a gradient is the right one times a factor."""
    _, single = _TOLERANCES[comparison.precision]
    return abs(gradient["ratio"] / factor - 1) <= single and gradient["rest"] <= single * max(1.0, factor)


def _other_cause(
    step: int,
    gradients: Mapping[str, Mapping[str, float]],
    wrong: Mapping[str, float],
    alone: Report,
    comparison: Comparison,
) -> DdpFinding:
    worst = max(wrong, key=lambda name: _size(wrong[name]))
    off = f"The gradient of {_named_worst_first(wrong)} is off by {percent(wrong[worst])} in step {step + 1}"
    if alone["noise"]["mixes_samples"] and not alone["batch_norm"]["sync"]:
        return _defect(
            "samples_mixed",
            f"{off}: the output for a sample depends on the samples beside it, and a rank sees its own samples only.",
            "Take statistics per sample (LayerNorm, GroupNorm), or over all ranks (train.batch_norm: sync; "
            "others of your own with hpcddp.gather_with_grad).",
        )
    ratio = gradients[worst]["ratio"]
    if not math.isnan(ratio):
        off += f"; its component along the right one is {ratio:.4g} times as long"
    train = comparison.job.train
    where = "the model"
    if train is not None and train.loss is not None:
        where = f"the loss {train.loss} (hpcddp doctor loss {train.loss}), then in the model,"
    return _defect(
        "gradient",
        f"{off}.",
        f"Look in {where} for what depends on the rank, the number of ranks or the size of a micro-batch.",
    )


def _judge_drift(ranks: Sequence[Report]) -> Iterator[DdpFinding]:
    for number, step in enumerate(_steps_of(ranks[0])):
        for report in ranks[1:]:
            name = _first_difference(step["parameters"], _steps_of(report)[number]["parameters"])
            if name is not None:
                yield _defect(
                    "drift",
                    f"After step {number + 1} parameter {name} on rank {report['rank']} is not that of rank "
                    "0: the replicas diverge.",
                    "Only the optimizer may change parameters, and nothing in it may depend on the rank.",
                )
                return


def _judge_buffers(ranks: Sequence[Report]) -> Iterator[DdpFinding]:
    for report in ranks[1:]:
        for first, other in zip(_steps_of(ranks[0]), _steps_of(report), strict=True):
            name = _first_difference(first["buffers"], other["buffers"])
            if name is not None:
                yield _note(
                    "buffers",
                    f"Buffer {name} on rank {report['rank']} is not that of rank 0; evaluations and "
                    "checkpoints take rank 0's.",
                    "All-reduce the sums that the model takes over samples.",
                )
                return


def _judge_batch_norm(alone: Report, ranks: Sequence[Report], comparison: Comparison) -> Iterator[DdpFinding]:
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


def _wrong_gradients(step: Mapping[str, Any], comparison: Comparison) -> dict[str, float]:
    """Return the errors that are no rounding errors, by the name of the parameter."""
    _, single = _TOLERANCES[comparison.precision]
    return {name: error for name, error in _errors_of(step).items() if _size(error) > single}


def _named_worst_first(wrong: Mapping[str, float]) -> str:
    """Return the names of the parameters, the one with the largest error first."""
    return _named(sorted(wrong, key=lambda name: _size(wrong[name]), reverse=True))


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
    """Return the first name whose value is another one in ``other``."""
    return next((name for name, value in first.items() if other.get(name) != value), None)
