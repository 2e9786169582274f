"""Format a diagnosis as text and as JSON."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any, Final

from hpcddp.doctor.errors import percent
from hpcddp.doctor.loss.examination import Diagnosis
from hpcddp.doctor.loss.verdict import Deviation, Judgement, Verdict

_MEANINGS: Final = {
    Verdict.MEAN: "It is the weighted mean of the losses of the shares: {ranks} ranks train what one process trains.",
    Verdict.SUM: "It is the sum of the losses of the shares: DDP averages them, a gradient {ranks} times too small.",
    Verdict.NOT_DECOMPOSABLE: "It is no mean of the losses of the shares: {ranks} ranks train another loss than one.",
    Verdict.ORDER_DEPENDENT: "It changes when the samples change places: it depends on who sits beside whom.",
}
_ROWS: Final = {
    "order": "whole batch, permuted",
    "even": "even shares",
    "uneven": "uneven shares",
    "permuted": "uneven shares, permuted",
}
_SHOWN_SHARES: Final = 8
_SAME_BELOW: Final = 1e-12


def explain(diagnosis: Diagnosis) -> str:
    """Return the diagnosis as text, ending with a newline."""
    judgement = diagnosis.finding.judgement
    lines = [
        f"{diagnosis.loss}: {diagnosis.verdict}",
        _MEANINGS[diagnosis.verdict].format(ranks=diagnosis.world_size),
        "",
        *_table(diagnosis, judgement),
    ]
    if diagnosis.verdict is not Verdict.MEAN:
        lines += ["", *_harm(diagnosis, judgement)]
    if diagnosis.repair is not None:
        helper = diagnosis.repair.helper
        lines += [
            "",
            f"repair: hpcddp.{helper}, because {diagnosis.repair.why}",
            *(f"    {line}" for line in diagnosis.repair.code),
            f"in a job file: that function as train.loss, with train.loss_reduction: {diagnosis.repair.loss_reduction}",
        ]
    if diagnosis.notes:
        lines += ["", *(f"note: {note}" for note in diagnosis.notes)]
    return "\n".join(lines) + "\n"


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return the diagnosis as a JSON document."""
    finding, judgement, repair = diagnosis.finding, diagnosis.finding.judgement, diagnosis.repair
    batch = finding.batches[finding.worst]
    return {
        "loss": diagnosis.loss,
        "verdict": diagnosis.verdict.value,
        "defect": diagnosis.verdict is not Verdict.MEAN,
        "tried_on": {
            "data": finding.data,
            "shapes": batch.describe(),
            "dtype": str(judgement.dtype).removeprefix("torch."),
            "batches": len(finding.batches),
        },
        "deviations": {name: _deviation(found) for name, found in judgement.deviations.items()},
        "plain_ddp": {
            "world_size": diagnosis.world_size,
            "global_batch_size": batch.samples,
            "shares": list(diagnosis.shares),
            **{f"{name}_error": value for name, value in _deviation(judgement.ddp.deviation).items()},
            "gradient_ratio": _number(judgement.ddp.ratio),
            "gradient_cosine": _number(judgement.ddp.cosine),
        },
        "repair": None if repair is None else asdict(repair),
        "notes": list(diagnosis.notes),
    }


def _table(diagnosis: Diagnosis, judgement: Judgement) -> list[str]:
    finding = diagnosis.finding
    batch = finding.batches[finding.worst]
    count = f"{len(finding.batches)} batches of " if len(finding.batches) > 1 else ""
    rows = [("against the mean over shares", "value", "gradient")] + [
        (f"  {label}", _off(judgement.deviations[name].value), _off(judgement.deviations[name].gradient))
        for name, label in _ROWS.items()
        if name in judgement.deviations
    ]
    return [
        f"tried on {count}{finding.data}: {batch.describe()}",
        *(f"{first:<30}{second:>12}{third:>12}" for first, second, third in rows),
    ]


def _harm(diagnosis: Diagnosis, judgement: Judgement) -> list[str]:
    ddp, shares = judgement.ddp, diagnosis.shares
    parts = " + ".join(map(str, shares)) if len(shares) <= _SHOWN_SHARES else f"{max(shares)} each at most"
    lines = [f"plain DDP, {diagnosis.world_size} ranks, a global batch of {sum(shares)} ({parts}):"]
    if math.isnan(ddp.deviation.worst) or math.isnan(ddp.deviation.value):
        return [*lines, "  a share's loss is not finite, and so is every gradient"]
    angle = math.degrees(math.acos(max(-1.0, min(1.0, ddp.cosine))))
    gradient = (
        f"  gradient off by {percent(ddp.deviation.gradient)}: its length is {ddp.ratio:.3f} of the right one, "
        f"its direction {angle:.1f} degrees away"
    )
    return [*lines, gradient, f"  logged loss off by {percent(ddp.deviation.value)}"]


def _off(fraction: float) -> str:
    return "same" if fraction < _SAME_BELOW else percent(fraction)


def _deviation(found: Deviation) -> dict[str, float | None]:
    return {"value": _number(found.value), "gradient": _number(found.gradient)}


def _number(value: float) -> float | None:
    """Return the number, or None if JSON cannot represent it."""
    return value if math.isfinite(value) else None
