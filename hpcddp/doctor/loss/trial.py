"""Judge a loss on the user's batches, or on all kinds of random batches that it accepts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from hpcddp.doctor.errors import NoisyLossError, NoLossError, UnusableError, percent
from hpcddp.doctor.loss.batches import Batch
from hpcddp.doctor.loss.call import Loss, ignored_labels, parameters_needed
from hpcddp.doctor.loss.kinds import Kind, kinds, kinds_with_other_classes
from hpcddp.doctor.loss.verdict import Judgement, Verdict, is_constant, judge

# Words of torch's errors about tensors of different dtypes.
_FORMAT_WORDS: Final = ("dtype", "scalar type", "Double")
_SEEDS: Final = (0, 1, 2)
# Common labels of samples to ignore, besides the number of classes. torch's default is tried last, since every cross
# entropy accepts it.
_IGNORED: Final = (255, 254, 250, -1)
_TORCH_IGNORED: Final = -100
_MOST_REASONS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The judgements of a loss on batches of one kind.

    Args:
        data: description of the kind.
        judgements: one for each batch.
    """

    data: str
    batches: tuple[Batch, ...]
    judgements: tuple[Judgement, ...]

    @property
    def worst(self) -> int:
        """The index of the judgement that decides: the worst verdict, then the largest deviation."""
        return max(range(len(self.judgements)), key=lambda i: _severity_key(self.judgements[i]))

    @property
    def judgement(self) -> Judgement:
        """The judgement that decides."""
        return self.judgements[self.worst]


def examine_random(loss: Loss, samples: int, world_size: int) -> tuple[Finding, list[str]]:
    """Return the worst finding on the kinds of random batches that the loss accepts, and notes on other kinds.

    Raises:
        UnusableError: the loss accepts no kind, or gives different values for the same batch.
    """
    trial = _Trial(loss, samples, world_size)
    usual = [*kinds(parameters_needed(loss.function), samples)]
    for kind in usual:
        if not kind.one_number:
            trial.take(kind)
    for kind in kinds_with_other_classes(samples):
        if trial.settled:
            break
        trial.take(kind)
    # Many losses read one number per sample as the classes of one sample, so these kinds are tried last.
    if not trial.settled:
        for kind in usual:
            if kind.one_number:
                trial.take(kind)
    return trial.outcome()


class _Trial:
    """Tries a loss on kinds of random batches, one after the other."""

    def __init__(self, loss: Loss, samples: int, world_size: int) -> None:
        self._loss, self._samples, self._world_size = loss, samples, world_size
        self.accepted: list[tuple[Kind, Finding]] = []
        self.refused: list[tuple[Kind, UnusableError]] = []

    @property
    def settled(self) -> bool:
        """Whether the loss ran on some kind, even if its result there is no loss."""
        return bool(self.accepted) or any(isinstance(error, NoLossError) for _, error in self.refused)

    def take(self, kind: Kind) -> None:
        """Try a kind.

        Raises:
            NoisyLossError: the loss gives different values for the same batch.
        """
        seeds = _SEEDS[:1] if self.accepted else _SEEDS
        try:
            batches = [kind.batch(self._samples, seed) for seed in seeds]
            self.accepted.append((kind, judge_all(self._loss, batches, kind.name, self._world_size)))
        except NoisyLossError:
            raise
        except UnusableError as error:
            self.refused.append((kind, error))

    def outcome(self) -> tuple[Finding, list[str]]:
        """Return the finding that decides, and a note on a kind with another verdict.

        Raises:
            UnusableError: no kind was accepted.
        """
        if not self.accepted:
            raise self._refusal()
        # Of equal verdicts, one without a nonfinite share decides; of several kinds the first, which is the simplest.
        _, finding = max(
            self.accepted, key=lambda pair: (pair[1].judgement.verdict.severity, pair[1].judgement.bad_share is None)
        )
        verdict = finding.judgement.verdict
        if verdict is Verdict.MEAN:
            labelled = next((kind for kind, _ in self.accepted if kind.labels is not None), None)
            return (finding, []) if labelled is None else self._with_other_labels(labelled, finding)
        differing = [(kind.name, f.judgement.verdict) for kind, f in self.accepted if f.judgement.verdict != verdict]
        notes = [
            f"On {name} it is {other}: give batches like your own with --data to be sure." for name, other in differing
        ]
        return finding, notes[:1]

    def _with_other_labels(self, kind: Kind, finding: Finding) -> tuple[Finding, list[str]]:
        """Return the finding that decides if some classes have weights, or some labels are ignored.

        Args:
            kind: a kind with labels.
            finding: the finding on random classes, with the verdict MEAN.
        """
        every = self._judge(kind.with_every_class(self._samples), f"{kind.name}, every one of them")
        if every is not None and every.judgement.verdict is not Verdict.MEAN:
            return every, []
        marks = {*ignored_labels(self._loss.function), *_IGNORED, kind.classes} - {_TORCH_IGNORED}
        for label in (*sorted(marks), _TORCH_IGNORED):
            batches = [kind.with_ignored(self._samples, seed, label) for seed in _SEEDS]
            ignoring = self._judge(batches, f"{kind.name}, some of them {label}")
            if ignoring is None or ignoring.judgement.verdict is Verdict.MEAN:
                continue
            if label != _TORCH_IGNORED:
                return ignoring, []
            error = ignoring.judgement.ddp.deviation.gradient
            note = (
                f"If labels can be {label}, which torch ignores, it is {ignoring.judgement.verdict} (with 3 labels in "
                f"10 so the gradient is off by {percent(error)}): use weighted_mean(sum, number of the others)."
            )
            return finding, [note]
        return finding, []

    def _judge(self, batches: Sequence[Batch], data: str) -> Finding | None:
        """Return the finding on batches; None if the loss does not accept them."""
        try:
            return judge_all(self._loss, batches, data, self._world_size)
        except UnusableError:
            return None

    def _refusal(self) -> UnusableError:
        """Return the error for a loss that accepts no kind."""
        spoken = [error for _, error in self.refused if isinstance(error, NoLossError)]
        if spoken:
            return spoken[0]
        prefix = f"{self._loss.name} failed: "
        reasons = {error.message.removeprefix(prefix): kind.name for kind, error in reversed(self.refused)}
        if len(reasons) == 1:
            return self.refused[0][1]
        first = list(reversed(reasons.items()))[:_MOST_REASONS]
        examples = "; ".join(f"on {name}: {reason}" for reason, name in first)
        return UnusableError(
            f"{self._loss.name} takes none of {len(self.refused)} kinds of random batches ({examples}); give it "
            "batches like your own with --data module:function, which returns (outputs, targets)"
        )


def judge_all(loss: Loss, batches: Sequence[Batch], data: str, world_size: int) -> Finding:
    """Judge a loss on batches in float64, or in float32 if it requires that dtype.

    Raises:
        UnusableError: the loss accepts neither, or its results cannot be compared.
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


def _severity_key(judgement: Judgement) -> tuple[int, bool, float]:
    # Of equal verdicts, one without a nonfinite share decides; the nonfinite share is reported in a note.
    return judgement.verdict.severity, judgement.bad_share is None, judgement.ddp.deviation.worst
