"""Compare a run that met a fault with the undisturbed one: equal or not, and from which step on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from hpcddp.rehearse.saved import MEASURED, SavedComparison
from hpcddp.run.metrics import MetricsLine

Metrics = Mapping[tuple[int, str], float]
"""What was measured, by step and name."""

LARGEST_ROUNDING: Final = 1e-5
"""The largest relative difference that is taken for rounding: of float32, over the few steps of a rehearsal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricDifference:
    """A metric that differs.

    Args:
        expected: its value in the undisturbed run.
        found: its value in the disturbed one.
    """

    step: int
    name: str
    expected: float
    found: float

    @property
    def relative(self) -> float:
        """The difference over the value in the undisturbed run."""
        return abs(self.found - self.expected) / (abs(self.expected) or 1.0)

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
        metrics: the metrics that differ, in the order in which they were reported.
        saved: the comparison of what they have saved.
        same_parameters: whether the digests of the parameters agree; None where there is none.
        starts_over: whether the second attempt began at the beginning.
    """

    metrics: Sequence[MetricDifference]
    saved: SavedComparison
    same_parameters: bool | None
    starts_over: bool

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return not self.metrics and not self.saved.differences and self.same_parameters is not False

    @property
    def is_rounding(self) -> bool:
        """Whether all that differs is as small as the rounding of sums in another order."""
        if self.same_parameters is False and not self.saved.differences:
            # A digest does not say by how much.
            return False
        relative = [difference.relative for difference in self.metrics]
        relative += [difference.value.relative for difference in self.saved.differences]
        return all(number <= LARGEST_ROUNDING for number in relative)

    def sentences(self) -> Iterator[str]:
        """Yield the differences in words."""
        if self.metrics:
            yield str(self.metrics[0])
        if self.saved.differences:
            others = len(self.saved.differences) - 1
            sentence = str(self.saved.differences[0])
            if others:
                sentence += f", and {others} others differ"
            yield sentence
        elif self.same_parameters is False:
            yield "the parameters differ"


def compare(reference: Course, disturbed: Course, saved: SavedComparison) -> Comparison:
    """Compare two runs.

    Args:
        reference: the undisturbed run.
        disturbed: the run that met a fault.
        saved: the comparison of what they have saved.
    """
    same_parameters: bool | None = None
    if reference.parameters_sha256 is not None:
        same_parameters = reference.parameters_sha256 == disturbed.parameters_sha256
    return Comparison(
        metrics=list(_metric_differences(_metrics_of(reference.before), disturbed)),
        saved=saved,
        same_parameters=same_parameters,
        starts_over=_starts_over(reference, disturbed),
    )


def _metric_differences(expected: Metrics, disturbed: Course) -> Iterator[MetricDifference]:
    for lines in (disturbed.before, disturbed.after):
        for (step, name), found in _metrics_of(lines).items():
            value = expected.get((step, name))
            if value is not None and value != found:
                yield MetricDifference(step=step, name=name, expected=value, found=found)


def _metrics_of(lines: Iterable[MetricsLine]) -> Metrics:
    """Return what lines report that depends on the training alone; the last line of a step counts."""
    return {
        (line.step, name): value
        for line in lines
        for name, value in line.numbers().items()
        if not MEASURED.search(name)
    }


def _starts_over(reference: Course, disturbed: Course) -> bool:
    first = disturbed.first_step_after
    steps = training_steps(reference.before)
    if first is not None and steps:
        done = training_steps(disturbed.before)
        return first <= steps[0] and len(done) > 1
    # Three losses with all their digits are not equal by chance.
    return len(set(disturbed.losses_after)) > 1 and disturbed.losses_after == reference.losses_before
