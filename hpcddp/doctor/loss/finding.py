"""The judgements of a loss on batches of one kind, in a dtype that the loss accepts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from hpcddp.doctor.errors import NoLossError, UnusableError
from hpcddp.doctor.loss.batches import Batch
from hpcddp.doctor.loss.call import Loss
from hpcddp.doctor.loss.verdict import Judgement, Verdict, is_constant, judge

# Words of torch's errors about tensors of different dtypes.
_DTYPE_WORDS: Final = ("dtype", "scalar type", "Double")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The judgements of a loss on batches of one kind.

    Args:
        data: description of the kind.
        judgements: one for each batch.
        notes: what is known of other kinds, one sentence each.
    """

    data: str
    batches: tuple[Batch, ...]
    judgements: tuple[Judgement, ...]
    notes: tuple[str, ...] = ()

    @property
    def worst(self) -> int:
        """The index of the judgement that decides: the worst verdict, then the largest deviation."""
        return max(range(len(self.judgements)), key=lambda index: _severity_key(self.judgements[index]))

    @property
    def judgement(self) -> Judgement:
        """The judgement that decides."""
        return self.judgements[self.worst]

    @property
    def batch(self) -> Batch:
        """The batch that decides."""
        return self.batches[self.worst]

    @property
    def verdict(self) -> Verdict:
        """The verdict that decides."""
        return self.judgement.verdict


def _severity_key(judgement: Judgement) -> tuple[int, bool, float]:
    # Of equal verdicts, one without a nonfinite share decides; the nonfinite share is reported in a note.
    return judgement.verdict.severity, judgement.bad_share is None, judgement.ddp.deviation.worst


def judge_all(loss: Loss, batches: Sequence[Batch], data: str, world_size: int) -> Finding:
    """Judge a loss on batches in float64, or in float32 if it requires that dtype.

    Args:
        data: description of the batches.

    Raises:
        UnusableError: the loss accepts neither, or its results cannot be compared.
    """
    try:
        return _judge_in(torch.float64, loss, batches, data, world_size)
    except NoLossError:
        raise
    except UnusableError as error:
        if not any(word in error.message for word in _DTYPE_WORDS):
            raise
    return _judge_in(torch.float32, loss, batches, data, world_size)


def _judge_in(dtype: torch.dtype, loss: Loss, batches: Sequence[Batch], data: str, world_size: int) -> Finding:
    converted = tuple(batch.to(dtype) for batch in batches)
    for batch in converted:
        _refuse_useless(loss, batch, data)
    judgements = tuple(judge(loss, batch, world_size=world_size, seed=seed) for seed, batch in enumerate(converted))
    return Finding(data=data, batches=converted, judgements=judgements)


def _refuse_useless(loss: Loss, batch: Batch, data: str) -> None:
    """Refuse a loss that is not finite, or does not depend on the outputs.

    Raises:
        NoLossError: it is so.
    """
    whole = loss.evaluate(batch)
    if not whole.finite:
        what = "has a gradient that is not finite" if math.isfinite(whole.value) else f"is {whole.value}"
        raise NoLossError(
            f"{loss.name} {what} on a batch of {data} ({batch.describe()}), and nothing can be compared with that; "
            "give it batches like your own with --data module:function"
        )
    if is_constant(whole, batch):
        raise NoLossError(
            f"{loss.name} is {whole.value:.6g} for all outputs (on {data}): its gradient is 0 everywhere, so "
            "that nothing can be learned from it; use the outputs themselves, not their comparison or rounding"
        )
