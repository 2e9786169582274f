"""From what one process and W ranks reported to what is wrong, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from hpcddp.doctor.ddp_finding import DdpFinding, errors_of, named, steps_of
from hpcddp.doctor.ddp_gradients import judge_gradients
from hpcddp.doctor.ddp_job import Comparison
from hpcddp.doctor.ddp_processes import Report
from hpcddp.doctor.wording import percent

_EXPLAIN_GRADIENTS: Final = ("initialisation_by_world_size", "other_samples", "drift")


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
    judges = (_initialisation, _unused, _noise, _samples, judge_gradients, _drift, _buffers, _batch_norm)
    found = [finding for find in judges for finding in find(alone, ranks, comparison)]
    if any(finding.kind in _EXPLAIN_GRADIENTS for finding in found):
        found = [finding for finding in found if finding.kind != "gradient"]
    return sorted(found, key=lambda finding: finding.severity)


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
                sentence=f"{named(only)} gets a gradient on some ranks only: rank {report['rank']} and rank 0 differ"
                + (" on the same samples." if known else "; DDP waits for the others for ever."),
                way_out="Use every parameter on every rank"
                + ("." if known else ", or give the model an attribute find_unused_parameters = True."),
            )
            return
    if ranks[0]["unused"]:
        yield DdpFinding(
            kind="unused_parameters",
            severity="note",
            sentence=f"No gradient reaches {named(ranks[0]['unused'])}, on any rank; DDP looks for it in every step.",
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
            way_out="Do not seed torch in the model, nor draw from a generator of its own: hpcddp seeds torch's by "
            "seed, step and rank.",
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
    for number, step in enumerate(steps_of(alone) if steps_of(ranks[0]) else ()):
        others = [sample for report in ranks for sample in steps_of(report)[number]["samples"]]
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


def _drift(_: Report, ranks: Sequence[Report], __: Comparison) -> Iterator[DdpFinding]:
    for number, step in enumerate(steps_of(ranks[0])):
        for report in ranks[1:]:
            if name := _first_difference(step["parameters"], steps_of(report)[number]["parameters"]):
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
        for first, other in zip(steps_of(ranks[0]), steps_of(report), strict=True):
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
    error = max(errors_of(live["steps"][0]).values(), default=0.0)
    yield DdpFinding(
        kind="ghost_batch_norm",
        severity="note",
        sentence=f"BatchNorm ({layers} layer{'s' if layers > 1 else ''}) takes its statistics over micro-batches of "
        f"{smallest} samples or more, and one process over {comparison.global_batch_size}: that alone changes "
        f"gradients by {percent(error)}.",
        way_out="It was held still for the comparison. For one batch over all ranks: train.batch_norm: sync.",
    )


def _first_difference(one: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    return next((name for name, value in one.items() if other.get(name) != value), None)
