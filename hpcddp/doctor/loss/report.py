"""The report of ``hpcddp doctor loss``, as text and as JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from hpcddp.doctor.errors import percent
from hpcddp.doctor.loss.examination import Diagnosis
from hpcddp.doctor.loss.verdict import Ddp, Deviation, Verdict


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
_SPLIT_LABELS: Final = {
    "order": "whole batch, permuted",
    "even": "even shares",
    "uneven": "uneven shares",
    "permuted": "uneven shares, permuted",
}
_SAME_BELOW: Final = 1e-12


def explain(diagnosis: Diagnosis) -> str:
    """Return the diagnosis as text, ending with a newline."""
    judgement = diagnosis.judgement
    advice = _ADVICE[diagnosis.verdict]
    lines = [
        f"{diagnosis.loss}: {diagnosis.verdict}",
        advice.meaning.format(ranks=len(judgement.ddp.shares)),
        "",
        f"tried in {_dtype_name(diagnosis)} on {judgement.batch.data}: {judgement.batch.describe()}",
        _table_row("against the mean over shares", "value", "gradient"),
    ]
    for name, label in _SPLIT_LABELS.items():
        deviation = judgement.deviations[name]
        lines.append(_table_row(f"  {label}", _describe_error(deviation.value), _describe_error(deviation.gradient)))
    if diagnosis.verdict is not Verdict.MEAN:
        lines += ["", *_ddp_lines(judgement.ddp), ""]
        lines += [f"use hpcddp.{helper} {use}" for helper, use in advice.helpers.items()]
        lines.append(f"in a job file: train.loss_reduction: {advice.loss_reduction}")
    lines += [f"\nnote: {note}" for note in diagnosis.notes]
    return "\n".join(lines) + "\n"


def _dtype_name(diagnosis: Diagnosis) -> str:
    return str(diagnosis.judgement.dtype).removeprefix("torch.")


def _table_row(label: str, value: str, gradient: str) -> str:
    return f"{label:<30}{value:>12}{gradient:>12}"


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
        "deviations": {name: _deviation_as_json(deviation) for name, deviation in judgement.deviations.items()},
        "plain_ddp": {
            "world_size": len(ddp.shares),
            "global_batch_size": sum(ddp.shares),
            "shares": list(ddp.shares),
            "value_error": _finite_or_none(ddp.deviation.value),
            "gradient_error": _finite_or_none(ddp.deviation.gradient),
            "gradient_ratio": _finite_or_none(ddp.ratio),
            "gradient_cosine": _finite_or_none(ddp.cosine),
        },
        "helpers": list(advice.helpers),
        "loss_reduction": advice.loss_reduction,
        "notes": list(diagnosis.notes),
    }


def _deviation_as_json(deviation: Deviation) -> dict[str, float | None]:
    return {"value": _finite_or_none(deviation.value), "gradient": _finite_or_none(deviation.gradient)}


def _finite_or_none(value: float) -> float | None:
    """Return the number, or None if JSON cannot represent it."""
    return value if math.isfinite(value) else None
