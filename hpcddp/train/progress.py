"""Progress of a training, as it is written to the manifest of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hpcddp.train.evaluation import Evaluation
from hpcddp.train.noise import NoiseScale


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a training is.

    Args:
        step: optimizer steps done.
        epoch: the epoch that the next step belongs to, zero-based.
        samples_seen: samples trained on, repeats counted.
        skipped_steps: updates skipped because a loss or gradient was not finite.
        wall_s: seconds spent in ``run_training`` over all attempts, up to here.
        last_loss: loss of the last step; None before the first, or if it was not finite.
        evaluation: the last evaluation; None before the first.
        evaluated_step: optimizer steps done at the last evaluation; None before the first.
        noise: the gradient noise scale; None where it is not measured.
    """

    step: int = 0
    epoch: int = 0
    samples_seen: int = 0
    skipped_steps: int = 0
    wall_s: float = 0.0
    last_loss: float | None = None
    evaluation: Evaluation | None = None
    evaluated_step: int | None = None
    noise: NoiseScale | None = None

    def as_document(self) -> dict[str, Any]:
        """Return the progress as a JSON document; numbers that are not finite become null."""
        document = asdict(self)
        if self.evaluation is not None:
            document["evaluation"] = {
                name: value if math.isfinite(value) else None for name, value in self.evaluation.as_record().items()
            }
        return document

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Progress:
        """Return the progress that ``as_document`` wrote."""
        evaluation = document["evaluation"]
        if evaluation is not None:
            numbers: dict[str, Any] = {name: math.nan if value is None else value for name, value in evaluation.items()}
            evaluation = Evaluation(**numbers)
        # Checkpoints of earlier versions have no such entry.
        noise = document.get("noise")
        return cls(**{**document, "evaluation": evaluation, "noise": noise and NoiseScale(**noise)})
