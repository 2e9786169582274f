"""Compare a run that met a fault with the undisturbed one: equal or not, from which step on, and probably why."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from hpcddp.rehearse.saved import MEASURED, SavedComparison
from hpcddp.run.metrics import MetricsLine

Metrics = Mapping[tuple[int, str], float]
"""What was measured, by step and name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricDifference:
    """The first metric that differs.

    Args:
        step: its step.
        name: its name.
        expected: its value in the undisturbed run.
        found: its value in the disturbed one.
    """

    step: int
    name: str
    expected: float
    found: float

    def __str__(self) -> str:
        """Return it in words."""
        return f"{self.name} of step {self.step} is {self.found:.9g}, and {self.expected:.9g} without the fault"


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What a run has reported.

    Args:
        before: the lines of its metrics before the fault; of an undisturbed run all of them.
        after: the lines after the resumption.
        losses_before: the first losses that rank 0 has printed in its first attempt, as printed.
        losses_after: the same of its second attempt.
        parameters_sha256: the digest of the trained parameters that a built-in training reports; None without one.
    """

    before: Sequence[MetricsLine]
    after: Sequence[MetricsLine] = ()
    losses_before: Sequence[str] = ()
    losses_after: Sequence[str] = ()
    parameters_sha256: str | None = None

    @property
    def first_step_after(self) -> int | None:
        """The first step of the training after the resumption; None if none was reported."""
        return next(iter(training_steps(self.after)), None)

    def steps_repeated(self) -> int | None:
        """Return how many reported steps were computed again; None if steps are not reported."""
        first = self.first_step_after
        if first is None:
            return None
        return sum(step >= first for step in training_steps(self.before))


def training_steps(lines: Iterable[MetricsLine]) -> list[int]:
    """Return the steps of the training that lines report, each once, in their order."""
    return list(dict.fromkeys(line.step for line in lines if not line.evaluations()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How a disturbed run differs from the undisturbed one.

    Args:
        metric: the first metric that differs; None if all are equal.
        saved: the comparison of what they have saved.
        same_parameters: whether the digests of the parameters agree; None where there is none.
        starts_over: whether the second attempt began at the beginning.
        cause: the likely cause of a difference, a sentence; None without a difference.
    """

    metric: MetricDifference | None
    saved: SavedComparison
    same_parameters: bool | None
    starts_over: bool
    cause: str | None

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return self.metric is None and not self.saved.differences and self.same_parameters is not False

    def sentences(self) -> Iterator[str]:
        """Yield the differences in words."""
        if self.metric is not None:
            yield str(self.metric)
        if self.saved.differences:
            others = len(self.saved.differences) - 1
            yield f"{self.saved.differences[0]}{f', and {others} others differ' if others else ''}"
        elif self.same_parameters is False:
            yield "the parameters differ"


def compare(
    reference: Course, disturbed: Course, saved: SavedComparison, *, names_at_resumption: Sequence[str]
) -> Comparison:
    """Compare two runs.

    Args:
        reference: the undisturbed run.
        disturbed: the run that met a fault.
        saved: the comparison of what they have saved.
        names_at_resumption: the names of the values in the newest file that the resumption found; empty if there was
            none that can be loaded.
    """
    same_parameters: bool | None = None
    if reference.parameters_sha256 is not None:
        same_parameters = reference.parameters_sha256 == disturbed.parameters_sha256
    expected = _metrics(reference.before)
    unexpected_before = _first_difference(expected, disturbed.before)
    metric = unexpected_before or _first_difference(expected, disturbed.after)
    starts_over = _starts_over(reference, disturbed)
    comparison = Comparison(
        metric=metric, saved=saved, same_parameters=same_parameters, starts_over=starts_over, cause=None
    )
    if comparison.is_equal and not starts_over:
        return comparison
    if unexpected_before is not None:
        cause = (
            "the runs differ before the fault already: a generator is not seeded, or an operation is not deterministic"
        )
    else:
        cause = _cause(comparison, expected, disturbed, names_at_resumption)
    return Comparison(
        metric=metric, saved=saved, same_parameters=same_parameters, starts_over=starts_over, cause=cause
    )


def _metrics(lines: Iterable[MetricsLine]) -> Metrics:
    """Return what lines report that depends on the training alone; the last line of a step counts."""
    return {
        (line.step, name): value
        for line in lines
        for name, value in line.numbers().items()
        if not MEASURED.search(name)
    }


def _first_difference(expected: Metrics, lines: Iterable[MetricsLine]) -> MetricDifference | None:
    for (step, name), found in _metrics(lines).items():
        value = expected.get((step, name))
        if value is not None and value != found:
            return MetricDifference(step=step, name=name, expected=value, found=found)
    return None


def _starts_over(reference: Course, disturbed: Course) -> bool:
    first = disturbed.first_step_after
    steps = training_steps(reference.before)
    if first is not None and steps:
        done = training_steps(disturbed.before)
        return first <= steps[0] and len(done) > 1
    # Three losses with all their digits are not equal by chance.
    return len(set(disturbed.losses_after)) > 1 and disturbed.losses_after == reference.losses_before


_STARTS_OVER: Final = "the second attempt starts over: it finds no checkpoint, or does not load the one that is there"
_STEP_COUNTER: Final = "the step counter is not that of the checkpoint: steps are counted from another number on"
_DATA_OR_RANDOM: Final = (
    "the first step after the resumption has other samples or other random numbers: the position in the epoch, the "
    "epoch of the sampler or the states of the generators are not restored, or the weights are not those of the step"
)
_NO_GENERATORS: Final = "; the checkpoint holds no state of a generator"
_OPTIMIZER_MISSING: Final = "the checkpoint holds no state of the optimizer: momentum and averages begin at zero"
_OPTIMIZER_NOT_LOADED: Final = (
    "the first step after the resumption is right and a later one is not: the state of the optimizer, its scheduler or "
    "its gradient scaler is not restored"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subject:
    """A part of a training, by the names of its metrics and of its saved values."""

    name: re.Pattern[str]
    cause: str


_OF_METRICS: Final = (
    _Subject(
        name=re.compile(r"(^|[_/.-])(lr|learning_rate)", re.IGNORECASE),
        cause="the learning rate is another one: the state of the scheduler is not restored, or it steps once too often",
    ),
    _Subject(
        name=re.compile(r"scale", re.IGNORECASE),
        cause="the loss scale is another one: the state of the gradient scaler is not restored",
    ),
)
_OF_SAVED: Final = (
    _Subject(
        name=re.compile(r"running_mean|running_var|num_batches_tracked"),
        cause="the buffers of BatchNorm are not restored: they are no parameters, but in the state_dict of the model",
    ),
    _Subject(
        name=re.compile(r"ema|shadow|averaged|n_averaged", re.IGNORECASE),
        cause="the averaged weights (EMA) are not restored: the average begins anew at the resumption",
    ),
)
_OPTIMIZER: Final = re.compile(r"optim|exp_avg|momentum_buffer|param_groups", re.IGNORECASE)
_GENERATOR: Final = re.compile(r"rng|random|generator", re.IGNORECASE)


def _cause(
    comparison: Comparison, expected: Metrics, disturbed: Course, names_at_resumption: Sequence[str]
) -> str | None:
    metric = comparison.metric
    if comparison.starts_over:
        return _STARTS_OVER if metric is None else f"{_STEP_COUNTER}; the weights are those of the checkpoint"
    only_evaluations = metric is not None and MetricsLine(step=0, facts={metric.name: 0.0}).evaluations()
    if metric is None or only_evaluations:
        return _cause_of_saved(comparison.saved)
    if _is_shifted(expected, disturbed):
        return _STEP_COUNTER
    for subject in _OF_METRICS:
        if subject.name.search(metric.name):
            return subject.cause
    for subject in _OF_METRICS:
        at_once = _differs_at(expected, disturbed.after, metric.step, subject.name.search)
        if at_once:
            return subject.cause
    if metric.step == disturbed.first_step_after:
        has_generators = any(_GENERATOR.search(name) for name in names_at_resumption)
        return _DATA_OR_RANDOM if has_generators or not names_at_resumption else f"{_DATA_OR_RANDOM}{_NO_GENERATORS}"
    has_optimizer = any(_OPTIMIZER.search(name) for name in names_at_resumption)
    return _OPTIMIZER_NOT_LOADED if has_optimizer or not names_at_resumption else _OPTIMIZER_MISSING


def _cause_of_saved(saved: SavedComparison) -> str | None:
    """Return the likely cause if the metrics of the training are equal, and what is saved is not."""
    for subject in _OF_SAVED:
        if any(subject.name.search(difference.name) for difference in saved.differences):
            return subject.cause
    if saved.differences and all(_OPTIMIZER.search(difference.name) for difference in saved.differences):
        return "the state of the optimizer is not restored"
    return "state of the training is not restored" if saved.differences else None


def _differs_at(
    expected: Metrics, lines: Iterable[MetricsLine], step: int, is_subject: Callable[[str], object]
) -> bool:
    found = _metrics(lines)
    return any(
        place in expected and expected[place] != value
        for place, value in found.items()
        if place[0] == step and is_subject(place[1])
    )


def _is_shifted(expected: Metrics, disturbed: Course) -> bool:
    """Return whether the metrics after the resumption are those of the neighbouring steps."""
    found = {place: value for place, value in _metrics(disturbed.after).items() if _is_loss(place[1])}
    steps = sorted({step for step, _ in expected})
    strides = [second - first for first, second in pairwise(steps)]
    if not found or not strides:
        return False
    stride = min(strides)
    for shift in (-stride, stride):
        shifted = {place: expected.get((place[0] + shift, place[1])) for place in found}
        known = {place: value for place, value in shifted.items() if value is not None}
        if len(known) > 1 and all(found[place] == value for place, value in known.items()):
            return True
    return False


def _is_loss(name: str) -> bool:
    return "loss" in name.lower()
