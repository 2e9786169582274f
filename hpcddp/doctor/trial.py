"""Trying a loss on one kind of random batches after the other."""

from __future__ import annotations

from typing import Final

from hpcddp.doctor.errors import NoLossError, UnusableError
from hpcddp.doctor.finding import Finding, judge_all
from hpcddp.doctor.judging import Verdict
from hpcddp.doctor.kinds import CLASSES, Kind, kinds, kinds_with_other_classes
from hpcddp.doctor.running import Loss
from hpcddp.doctor.target import parameters_needed
from hpcddp.doctor.wording import percent

_SEEDS: Final = (0, 1, 2)
# What people mark labels with that do not count, one of the classes among them. Torch's own default comes last: every
# cross entropy takes it.
_IGNORED: Final = (255, -1, *range(CLASSES))
_TORCH_IGNORED: Final = -100
_MOST_REASONS: Final = 3


def examine_random(loss: Loss, samples: int, world_size: int) -> tuple[Finding, list[str]]:
    """Return what was found on the first kind of random batches that the loss accepts, and what differs on others.

    Raises:
        UnusableError: it accepts none.
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
    # A number per sample looks like the classes of a single sample to many losses: it is a last resort.
    if not trial.settled:
        for kind in usual:
            if kind.one_number:
                trial.take(kind)
    return trial.outcome()


class _Trial:
    """Tries a loss on one kind of random batches after the other."""

    def __init__(self, loss: Loss, samples: int, world_size: int) -> None:
        self._loss, self._samples, self._world_size = loss, samples, world_size
        self.accepted: list[tuple[Kind, Finding]] = []
        self.refused: list[tuple[Kind, UnusableError]] = []

    @property
    def settled(self) -> bool:
        """Whether the loss ran on a kind, even if it gave no loss there."""
        return bool(self.accepted) or any(isinstance(error, NoLossError) for _, error in self.refused)

    def take(self, kind: Kind) -> None:
        """Try a kind."""
        seeds = _SEEDS[:1] if self.accepted else _SEEDS
        try:
            batches = [kind.batch(self._samples, seed) for seed in seeds]
            self.accepted.append((kind, judge_all(self._loss, batches, kind.name, self._world_size)))
        except UnusableError as error:
            self.refused.append((kind, error))

    def outcome(self) -> tuple[Finding, list[str]]:
        """Return the finding that decides, and one sentence on those that differ.

        Raises:
            UnusableError: no kind was accepted.
        """
        if not self.accepted:
            raise self._refusal()
        whole = [pair for pair in self.accepted if pair[1].judgement.bad_share is None]
        kind, finding = (whole or self.accepted)[0]
        verdict = finding.judgement.verdict
        notes = []
        differing = [(other.name, f.judgement.verdict) for other, f in whole[1:] if f.judgement.verdict is not verdict]
        if differing:
            name, other_verdict = differing[0]
            notes.append(f"On {name} it is {other_verdict}: give batches like your own with --data to be sure.")
        if kind.labels is None or verdict is not Verdict.MEAN:
            return finding, notes
        ignoring, note = self._with_ignored_labels(kind)
        return ignoring or finding, [*notes, *note]

    def _with_ignored_labels(self, kind: Kind) -> tuple[Finding | None, list[str]]:
        """Return the finding if the loss takes labels that do not count, and a note on torch's own -100."""
        for label in (*_IGNORED, _TORCH_IGNORED):
            seeds = _SEEDS[:1] if label in range(CLASSES) else _SEEDS
            batches = [kind.with_ignored(self._samples, seed, label) for seed in seeds]
            try:
                data = f"{kind.name}, some of them {label}"
                finding = judge_all(self._loss, batches, data, self._world_size)
            except UnusableError:
                continue
            if finding.judgement.verdict is Verdict.MEAN:
                continue
            if label != _TORCH_IGNORED:
                return finding, []
            error = finding.judgement.ddp.deviation.gradient
            note = (
                f"If labels can be {label}, which torch ignores, it is {finding.judgement.verdict} (with 3 labels in "
                f"10 so the gradient is off by {percent(error)}): use weighted_mean(sum, number of the others)."
            )
            return None, [note]
        return None, []

    def _refusal(self) -> UnusableError:
        """Return the error that says most about why no kind was accepted."""
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
