"""Examine a loss on the kinds of random batches that it accepts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch

from hpcddp.doctor.errors import NoisyLossError, NoLossError, UnusableError, percent
from hpcddp.doctor.loss.batches import Batch
from hpcddp.doctor.loss.call import Loss, ignored_labels, parameters_needed
from hpcddp.doctor.loss.finding import Finding, judge_all
from hpcddp.doctor.loss.random_batches import Kind, LabelledKind, kinds, kinds_with_other_classes
from hpcddp.doctor.loss.repairs import repair_for
from hpcddp.doctor.loss.verdict import Verdict, judged_splits

_SEEDS: Final = (0, 1, 2)
# Powers of ten, of the smallest and the largest factor.
_SCALES: Final = (-2.0, 1.0)
# Common labels of samples to ignore, besides the number of classes. torch's default is tried last, since every cross
# entropy accepts it.
_IGNORED: Final = (255, 254, 250, -1)
_TORCH_IGNORED: Final = -100
_MOST_REASONS: Final = 3


def examine_random(loss: Loss, samples: int, world_size: int) -> Finding:
    """Return the worst finding on the kinds of random batches that the loss accepts, with a note on other kinds.

    Raises:
        UnusableError: the loss accepts no kind, or gives different values for the same batch.
    """
    trial = _Trial(loss, samples, world_size)
    usual_kinds = kinds(parameters_needed(loss.function), samples)
    for kind in usual_kinds:
        if not kind.one_number:
            trial.take(kind)
    for kind in kinds_with_other_classes(samples):
        if trial.is_settled:
            break
        trial.take(kind)
    # Many losses read one number per sample as the classes of one sample, so these kinds are tried last.
    if not trial.is_settled:
        for kind in usual_kinds:
            if kind.one_number:
                trial.take(kind)
    return trial.outcome()


class _Trial:
    """Tries a loss on kinds of random batches, one after the other."""

    def __init__(self, loss: Loss, samples: int, world_size: int) -> None:
        self._loss = loss
        self._samples = samples
        self._world_size = world_size
        self._accepted: list[tuple[Kind, Finding]] = []
        self._refused: list[tuple[Kind, UnusableError]] = []

    @property
    def is_settled(self) -> bool:
        """Whether the loss ran on some kind, even if its result there is no loss."""
        return bool(self._accepted) or any(isinstance(error, NoLossError) for _, error in self._refused)

    def take(self, kind: Kind) -> None:
        """Try a kind.

        Raises:
            NoisyLossError: the loss gives different values for the same batch.
        """
        seeds = _SEEDS[:1] if self._accepted else _SEEDS
        try:
            batches = [kind.batch(self._samples, seed) for seed in seeds]
            finding = judge_all(self._loss, batches, kind.name, self._world_size)
        except NoisyLossError:
            raise
        except UnusableError as error:
            self._refused.append((kind, error))
        else:
            self._accepted.append((kind, finding))

    def outcome(self) -> Finding:
        """Return the finding that decides, with a note on a kind with another verdict.

        Raises:
            UnusableError: no kind was accepted.
        """
        if not self._accepted:
            raise self._refusal()
        # Of several kinds the first one decides, which is the simplest.
        worst = max((finding for _, finding in self._accepted), key=_severity_key)
        if worst.verdict is Verdict.MEAN:
            return self._confirm_mean(worst)
        for kind, finding in self._accepted:
            if finding.verdict is not worst.verdict:
                note = f"On {kind.name} it is {finding.verdict}: give batches like your own with --data to be sure."
                return replace(worst, notes=(note,))
        return worst

    def _confirm_mean(self, mean: Finding) -> Finding:
        """Return the finding that decides about a loss that is a mean on all usual batches."""
        scaled = self._find_threshold(self._accepted[0][0])
        if scaled is not None:
            return scaled
        for kind, _ in self._accepted:
            if isinstance(kind, LabelledKind):
                return self._try_other_labels(kind, mean)
        return mean

    def _find_threshold(self, kind: Kind) -> Finding | None:
        """Return the finding on samples of very different sizes, if it is another one: a loss may have a threshold.

        The samples are ordered by size, so that the shares differ.
        """
        factors = torch.logspace(*_SCALES, self._samples, dtype=torch.float64)
        batch = kind.batch(self._samples, _SEEDS[0])
        for how, scaled in (
            ("of very different sizes", batch.scaled(factors)),
            ("near them", batch.near_targets(factors)),
        ):
            if scaled is None:
                continue
            finding = self._judge_unless_mean([scaled], f"{kind.name}, {how}")
            if finding is not None and finding.judgement.bad_share is None:
                return finding
        return None

    def _try_other_labels(self, kind: LabelledKind, mean: Finding) -> Finding:
        """Return the finding that decides if some classes have weights, or some labels are ignored."""
        every_class = kind.with_every_class(self._samples)
        finding = self._judge_unless_mean(every_class, f"{kind.name}, every one of them")
        if finding is not None:
            return finding
        labels = {*ignored_labels(self._loss.function), *_IGNORED, kind.classes} - {_TORCH_IGNORED}
        for label in sorted(labels):
            finding = self._judge_ignoring(kind, label)
            if finding is not None:
                return finding
        finding = self._judge_ignoring(kind, _TORCH_IGNORED)
        if finding is not None:
            return replace(mean, notes=(self._note_on_torch_ignored(finding),))
        return mean

    def _judge_ignoring(self, kind: LabelledKind, label: int) -> Finding | None:
        """Return the finding if the loss is no mean where some samples have this label."""
        batches = [kind.with_ignored(self._samples, seed, label) for seed in _SEEDS]
        return self._judge_unless_mean(batches, f"{kind.name}, some of them {label}")

    def _judge_unless_mean(self, batches: Sequence[Batch], data: str) -> Finding | None:
        """Return the finding on batches; None if the loss is a mean on them, or does not accept them."""
        try:
            finding = judge_all(self._loss, batches, data, self._world_size)
        except UnusableError:
            return None
        return None if finding.verdict is Verdict.MEAN else finding

    def _note_on_torch_ignored(self, ignoring: Finding) -> str:
        """Return what a loss that is a mean becomes if some labels are ignored, and the helper for that."""
        splits = judged_splits(ignoring.batch.samples, self._world_size, ignoring.worst)
        repair = repair_for(self._loss, ignoring.batch, ignoring.verdict, splits=splits)
        use = "" if repair is None else str(repair.helper)
        if use == "weighted_mean":
            use = "weighted_mean(sum, number of the others)"
        return (
            f"If labels can be {_TORCH_IGNORED}, which torch ignores, it is {ignoring.verdict} (with 3 labels in 10 so "
            f"the gradient is off by {percent(ignoring.judgement.ddp.deviation.gradient)}): use {use}."
        )

    def _refusal(self) -> UnusableError:
        """Return the error for a loss that accepts no kind."""
        for _, error in self._refused:
            if isinstance(error, NoLossError):
                return error
        prefix = f"{self._loss.name} failed: "
        # In the order of the kinds, of which the first are the commonest.
        first_kinds: dict[str, str] = {}
        for kind, error in self._refused:
            first_kinds.setdefault(error.message.removeprefix(prefix), kind.name)
        if len(first_kinds) == 1:
            return self._refused[0][1]
        reasons = [f"on {name}: {reason}" for reason, name in first_kinds.items()]
        return UnusableError(
            f"{self._loss.name} takes none of {len(self._refused)} kinds of random batches "
            f"({'; '.join(reasons[:_MOST_REASONS])}); give it batches like your own with --data module:function, which "
            "returns (outputs, targets)"
        )


def _severity_key(finding: Finding) -> tuple[int, bool]:
    # Of equal verdicts, one without a nonfinite share decides.
    return finding.verdict.severity, finding.judgement.bad_share is None
