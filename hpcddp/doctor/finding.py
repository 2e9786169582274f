"""What was found on one kind of batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from hpcddp.doctor.batches import Batch
from hpcddp.doctor.errors import NoLossError, UnusableError
from hpcddp.doctor.judging import Judgement, Verdict, is_constant, judge
from hpcddp.doctor.running import Loss

# Torch's words where number formats do not fit together.
_FORMAT_WORDS: Final = ("dtype", "scalar type", "Double")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was found on one kind of batches.

    Args:
        data: the kind in words.
        batches: the batches that the loss was tried on.
        judgements: one for each.
    """

    data: str
    batches: tuple[Batch, ...]
    judgements: tuple[Judgement, ...]

    @property
    def worst(self) -> int:
        """The index of the judgement that decides: not MEAN before MEAN, then what is farthest off."""
        return max(range(len(self.judgements)), key=lambda i: _gravity(self.judgements[i]))

    @property
    def judgement(self) -> Judgement:
        """The one that decides."""
        return self.judgements[self.worst]


def judge_all(loss: Loss, batches: Sequence[Batch], data: str, world_size: int) -> Finding:
    """Judge a loss on batches in float64, or in float32 where it holds numbers of that format.

    Raises:
        UnusableError: it takes neither, or gives nothing to compare.
    """
    try:
        return _judge_as(loss, [batch.to(torch.float64) for batch in batches], data, world_size)
    except NoLossError:
        raise
    except UnusableError as error:
        if not any(word in error.message for word in _FORMAT_WORDS):
            raise
    return _judge_as(loss, [batch.to(torch.float32) for batch in batches], data, world_size)


def _judge_as(loss: Loss, batches: Sequence[Batch], data: str, world_size: int) -> Finding:
    for batch in batches:
        _refuse_useless(loss, batch, data)
    judgements = tuple(judge(loss, batch, world_size=world_size, seed=seed) for seed, batch in enumerate(batches))
    return Finding(data=data, batches=tuple(batches), judgements=judgements)


def _refuse_useless(loss: Loss, batch: Batch, data: str) -> None:
    whole = loss.evaluate(batch)
    if not whole.finite:
        what = "its gradient is not finite" if math.isfinite(whole.value) else f"is {whole.value}"
        raise NoLossError(
            f"{loss.name} {what} on a batch of {data} ({batch.describe()}), and nothing can be compared with that; "
            "give it batches like your own with --data module:function"
        )
    if is_constant(whole, batch):
        raise NoLossError(
            f"{loss.name} is {whole.value:.6g} whatever the outputs are (on {data}): its gradient is 0 everywhere, so "
            "that nothing can be learned from it; use the outputs themselves, not their comparison or rounding"
        )


def _gravity(judgement: Judgement) -> tuple[bool, bool, float]:
    # A number says more than NaN; that there was one becomes a note.
    return judgement.verdict is not Verdict.MEAN, judgement.bad_share is None, judgement.ddp.deviation.worst
