"""What every attempt of a run must agree with, because it decides which samples each step sees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from hpcddp.batch.order import CONTRACT_VERSION
from hpcddp.run.checkpoints import Checkpoint
from hpcddp.spec.job import JobSpec
from hpcddp.train.data.images import Data
from hpcddp.train.errors import ResumeError

_LABELS: Final = {
    "version": "the version of the batch contract",
    "seed": "train.seed",
    "samples": "the number of training samples",
    "unit": "batch.unit",
    "fingerprint": "the fingerprint of the training data",
    "global_batch_size": "batch.global_batch_size",
    "tail": "batch.tail",
    "order": "batch.order",
}
# What every training did before it became a choice.
_BEFORE: Final = {"unit": "sample"}


def contract_of(spec: JobSpec, data: Data, seed: int) -> dict[str, Any]:
    """Return what every attempt of a run must agree with: it decides which samples each step sees."""
    return {
        "version": CONTRACT_VERSION,
        "seed": seed,
        "samples": len(data.train),
        "unit": spec.batch.unit,
        "fingerprint": data.fingerprint,
        "global_batch_size": spec.global_batch_size,
        "tail": spec.batch.tail,
        "order": spec.batch.order,
    }


def refuse_another_contract(
    checkpoint: Checkpoint, contract: Mapping[str, Any], labels: Mapping[str, str] = _LABELS
) -> None:
    """Refuse to go on from a checkpoint of a training that sees other batches.

    Args:
        checkpoint: what there is to go on from.
        contract: what holds now.
        labels: what a person knows its entries by.

    Raises:
        ResumeError: names what differs, and both values.
    """
    for name, here in contract.items():
        saved = checkpoint.manifest.contract.get(name, _BEFORE.get(name))
        if saved != here:
            label = labels.get(name, name)
            raise ResumeError(
                f"{checkpoint.path.name} was saved with {label} {saved}, and now it is {here}, so that the "
                "steps to come would not see the samples that are left; bring the old one back, or submit a new run"
            )
