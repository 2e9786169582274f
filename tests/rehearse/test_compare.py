"""What differs after a resumption, and the likely cause, on values."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hpcddp.rehearse import cause as causes
from hpcddp.rehearse.cause import likely_cause
from hpcddp.rehearse.compare import Comparison, Course, compare
from hpcddp.rehearse.saved import SavedComparison, TensorDifference
from hpcddp.run.metrics import MetricsLine

NOTHING_SAVED = SavedComparison(files=0, differences=(), unreadable=())
FULL = ("checkpoint.pt.model.weight", "checkpoint.pt.optimizer.state.0.momentum_buffer", "checkpoint.pt.rng")


def lines(first: int, last: int, *, add: float = 0.0, since: int = 0, shift: int = 0) -> list[MetricsLine]:
    """Return the lines of some steps; ``add`` is added to the losses from the step ``since`` on."""
    return [
        MetricsLine(
            step=step,
            facts={"loss": 1 / (step + shift) + (add if step >= since else 0.0), "lr": 0.5, "step_s": step * add},
        )
        for step in range(first, last + 1)
    ]


REFERENCE = Course(before=lines(1, 20), losses_before=("2.301", "2.200", "2.100"))


def resumed(after: Sequence[MetricsLine], *, until: int = 12) -> Course:
    return Course(before=lines(1, until), after=after, losses_before=REFERENCE.losses_before)


def saved(*names: str, relative: float = 0.5) -> SavedComparison:
    differences = tuple(TensorDifference(file="last.pt", name=name, largest=1.0, relative=relative) for name in names)
    return SavedComparison(files=1, differences=differences, unreadable=())


def cause_of(course: Course, tensors: SavedComparison = NOTHING_SAVED, held: Sequence[str] = FULL) -> str | None:
    return likely_cause(compared(course, tensors), REFERENCE, course, held)


def compared(course: Course, tensors: SavedComparison = NOTHING_SAVED) -> Comparison:
    return compare(REFERENCE, course, tensors)


def test_equal_runs_have_no_difference_and_no_cause() -> None:
    course = resumed(lines(13, 20))
    assert compared(course).is_equal
    assert (course.steps_repeated(), cause_of(course)) == (0, None)


def test_steps_that_are_computed_again_are_counted() -> None:
    assert resumed(lines(9, 20)).steps_repeated() == 4


def test_measured_times_are_not_compared() -> None:
    course = resumed([MetricsLine(step=13, facts={"loss": 1 / 13, "samples_per_s": 7.0, "eval_s": 3.0})])
    assert compared(course).is_equal


def test_the_first_step_that_differs_is_named_with_both_values() -> None:
    metric = compared(resumed(lines(13, 20, add=0.25, since=15))).metric
    assert metric is not None
    assert (metric.step, metric.name, metric.found - metric.expected) == (15, "loss", 0.25)


@pytest.mark.parametrize(
    ("course", "tensors", "held", "expected"),
    [
        (Course(before=lines(1, 12, add=0.1), after=lines(13, 20)), NOTHING_SAVED, FULL, causes.UNSEEDED),
        (resumed(lines(1, 20)), NOTHING_SAVED, FULL, causes.STARTS_OVER),
        (resumed(lines(1, 8, shift=12)), NOTHING_SAVED, FULL, causes.STEP_COUNTER),
        (resumed(lines(13, 19, shift=1)), NOTHING_SAVED, FULL, causes.STEP_COUNTER),
        (resumed(lines(14, 20, add=0.1)), NOTHING_SAVED, FULL, causes.STEP_COUNTER),
        (resumed(lines(13, 20, add=0.1)), NOTHING_SAVED, FULL, causes.DATA_OR_RANDOM),
        (
            resumed(lines(13, 20, add=0.1)),
            NOTHING_SAVED,
            FULL[:2],
            f"{causes.DATA_OR_RANDOM}{causes.NO_GENERATORS}",
        ),
        (resumed(lines(13, 20, add=0.1, since=14)), NOTHING_SAVED, FULL, causes.OPTIMIZER_NOT_LOADED),
        (resumed(lines(13, 20, add=0.1, since=14)), NOTHING_SAVED, FULL[:1], causes.OPTIMIZER_MISSING),
        (resumed([MetricsLine(step=13, facts={"loss": 1.0, "lr": 0.1})]), NOTHING_SAVED, FULL, causes.SCHEDULER),
        (resumed(lines(13, 20)), saved("model.1.running_mean"), FULL, causes.BUFFERS),
        (resumed(lines(13, 20)), saved("ema.weight"), FULL, causes.AVERAGE),
        (resumed(lines(13, 20)), saved("scheduler.last_epoch"), FULL, causes.OTHER_STATE),
    ],
)
def test_the_likely_cause_follows_from_what_differs_first(
    course: Course, tensors: SavedComparison, held: Sequence[str], expected: str
) -> None:
    assert cause_of(course, tensors, held) == expected


def test_a_program_that_reports_no_metric_starts_over_if_it_prints_the_same_first_losses() -> None:
    reference = Course(before=(), losses_before=("2.301", "2.200", "2.100"))
    again = Course(before=(), losses_before=reference.losses_before, losses_after=reference.losses_before)
    assert compare(reference, again, NOTHING_SAVED).starts_over
    going_on = Course(before=(), losses_before=reference.losses_before, losses_after=("1.9", "1.8", "1.7"))
    assert not compare(reference, going_on, NOTHING_SAVED).starts_over


@pytest.mark.parametrize(("size", "is_rounding"), [(1e-7, True), (1e-3, False)])
def test_a_difference_as_small_as_rounding_is_told_apart(size: float, is_rounding: bool) -> None:  # noqa: FBT001
    course = resumed(lines(13, 20, add=size))
    assert compared(course, saved("model.weight", relative=size)).is_rounding is is_rounding


def test_another_digest_of_the_parameters_alone_is_a_difference() -> None:
    reference = Course(before=(), parameters_sha256="a")
    comparison = compare(reference, Course(before=(), parameters_sha256="b"), NOTHING_SAVED)
    assert not comparison.is_equal
    assert not comparison.is_rounding
    assert list(comparison.sentences()) == ["the parameters differ"]
