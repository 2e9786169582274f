"""Settings that must be the same in every attempt of a run, because they decide which samples each step sees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from hpcddp.batch.order import CONTRACT_VERSION
from hpcddp.jobfile.job import JobSpec
from hpcddp.run.checkpoints import Checkpoint
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
# Values that checkpoints of earlier versions do not state.
_IMPLIED_BEFORE: Final = {"unit": "sample"}


def contract_of(spec: JobSpec, data: Data, seed: int) -> dict[str, Any]:
    """Return the settings that must be the same in every attempt of a run."""
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
    """Refuse to resume from a checkpoint with another contract.

    Args:
        checkpoint: the checkpoint to resume from.
        contract: the contract of this attempt.
        labels: the entries' names in the error message.

    Raises:
        ResumeError: names the first entry that differs, with both values.
    """
    for name, now in contract.items():
        saved = checkpoint.manifest.contract.get(name, _IMPLIED_BEFORE.get(name))
        if saved != now:
            label = labels.get(name, name)
            raise ResumeError(
                f"{checkpoint.path.name} was saved with {label} {saved}, and now it is {now}, so that the "
                "steps to come would not see the samples that are left; bring the old one back, or submit a new run"
            )
