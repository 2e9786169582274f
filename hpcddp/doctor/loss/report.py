"""The report of ``hpcddp doctor loss``, as text and as JSON."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any, Final

from hpcddp.doctor.errors import percent
from hpcddp.doctor.loss.examination import Diagnosis
from hpcddp.doctor.loss.verdict import Deviation, Verdict

_MEANINGS: Final = {
    Verdict.MEAN: "It is the weighted mean of the losses of the shares: {ranks} ranks train what one process trains.",
    Verdict.SUM: "It is the sum of the losses of the shares: DDP averages them, a gradient {ranks} times too small.",
    Verdict.NOT_DECOMPOSABLE: "It is no mean of the losses of the shares: {ranks} ranks train another loss than one.",
    Verdict.ORDER_DEPENDENT: "It changes when the samples are permuted: it depends on their order.",
}
_SPLIT_LABELS: Final = {
    "order": "whole batch, permuted",
    "even": "even shares",
    "uneven": "uneven shares",
    "permuted": "uneven shares, permuted",
}
_SHOWN_SHARES: Final = 8
_SAME_BELOW: Final = 1e-12


def explain(diagnosis: Diagnosis) -> str:
    """Return the diagnosis as text, ending with a newline."""
    lines = [
        f"{diagnosis.loss}: {diagnosis.verdict}",
        _MEANINGS[diagnosis.verdict].format(ranks=diagnosis.world_size),
        "",
        *_deviation_lines(diagnosis),
    ]
    if diagnosis.verdict is not Verdict.MEAN:
        lines += ["", *_ddp_lines(diagnosis)]
    if diagnosis.repair is not None:
        repair = diagnosis.repair
        lines += ["", f"repair: hpcddp.{repair.helper}, because {repair.why}"]
        lines += [f"    {line}" for line in repair.code]
        lines.append(f"in a job file: that function as train.loss, with train.loss_reduction: {repair.loss_reduction}")
    if diagnosis.notes:
        lines += ["", *(f"note: {note}" for note in diagnosis.notes)]
    return "\n".join(lines) + "\n"


def _deviation_lines(diagnosis: Diagnosis) -> list[str]:
    finding = diagnosis.finding
    count = f"{len(finding.batches)} batches of " if len(finding.batches) > 1 else ""
    lines = [
        f"tried on {count}{finding.data}: {finding.batch.describe()}",
        _table_row("against the mean over shares", "value", "gradient"),
    ]
    for name, label in _SPLIT_LABELS.items():
        deviation = finding.judgement.deviations.get(name)
        if deviation is not None:
            lines.append(
                _table_row(f"  {label}", _describe_error(deviation.value), _describe_error(deviation.gradient))
            )
    return lines


def _table_row(label: str, value: str, gradient: str) -> str:
    return f"{label:<30}{value:>12}{gradient:>12}"


def _describe_error(fraction: float) -> str:
    return "same" if fraction < _SAME_BELOW else percent(fraction)


def _ddp_lines(diagnosis: Diagnosis) -> list[str]:
    ddp = diagnosis.finding.judgement.ddp
    shares = diagnosis.shares
    sizes = f"{max(shares)} each at most"
    if len(shares) <= _SHOWN_SHARES:
        sizes = " + ".join(map(str, shares))
    title = f"plain DDP, {diagnosis.world_size} ranks, a global batch of {sum(shares)} ({sizes}):"
    if math.isnan(ddp.deviation.worst) or math.isnan(ddp.deviation.value):
        return [title, "  a share's loss is not finite, and so is every gradient"]
    angle = math.degrees(math.acos(max(-1.0, min(1.0, ddp.cosine))))
    gradient = (
        f"  gradient off by {percent(ddp.deviation.gradient)}: its length is {ddp.ratio:.3f} of the right one, "
        f"its direction {angle:.1f} degrees away"
    )
    return [title, gradient, f"  logged loss off by {percent(ddp.deviation.value)}"]


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return the diagnosis as a JSON document."""
    finding = diagnosis.finding
    judgement = finding.judgement
    ddp = judgement.ddp
    return {
        "loss": diagnosis.loss,
        "verdict": diagnosis.verdict.value,
        "defect": diagnosis.verdict is not Verdict.MEAN,
        "tried_on": {
            "data": finding.data,
            "shapes": finding.batch.describe(),
            "dtype": str(judgement.dtype).removeprefix("torch."),
            "batches": len(finding.batches),
        },
        "deviations": {name: _deviation_as_json(deviation) for name, deviation in judgement.deviations.items()},
        "plain_ddp": {
            "world_size": diagnosis.world_size,
            "global_batch_size": finding.batch.samples,
            "shares": list(diagnosis.shares),
            "value_error": _finite_or_none(ddp.deviation.value),
            "gradient_error": _finite_or_none(ddp.deviation.gradient),
            "gradient_ratio": _finite_or_none(ddp.ratio),
            "gradient_cosine": _finite_or_none(ddp.cosine),
        },
        "repair": None if diagnosis.repair is None else asdict(diagnosis.repair),
        "notes": list(diagnosis.notes),
    }


def _deviation_as_json(deviation: Deviation) -> dict[str, float | None]:
    return {"value": _finite_or_none(deviation.value), "gradient": _finite_or_none(deviation.gradient)}


def _finite_or_none(value: float) -> float | None:
    """Return the number, or None if JSON cannot represent it."""
    return value if math.isfinite(value) else None
