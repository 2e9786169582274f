"""What differs after a resumption, on values."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hpcddp.doctor.tensors import TensorDifference
from hpcddp.rehearse.compare import Comparison, Course, SavedComparison, SavedDifference, compare
from hpcddp.run.metrics import MetricsLine

NOTHING_SAVED = SavedComparison(files=0, differences=(), unreadable=())


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
    values = [TensorDifference(name=name, largest=relative, size=1.0) for name in names]
    differences = tuple(SavedDifference(file="last.pt", value=value) for value in values)
    return SavedComparison(files=1, differences=differences, unreadable=())


def compared(course: Course, tensors: SavedComparison = NOTHING_SAVED) -> Comparison:
    return compare(REFERENCE, course, tensors)


def test_equal_runs_have_no_difference() -> None:
    course = resumed(lines(13, 20))
    assert compared(course).is_equal
    assert course.steps_repeated() == 0


def test_steps_that_are_computed_again_are_counted() -> None:
    assert resumed(lines(9, 20)).steps_repeated() == 4


def test_measured_times_are_not_compared() -> None:
    course = resumed([MetricsLine(step=13, facts={"loss": 1 / 13, "samples_per_s": 7.0, "eval_s": 3.0})])
    assert compared(course).is_equal


def test_the_first_step_that_differs_is_named_with_both_values() -> None:
    metric = compared(resumed(lines(13, 20, add=0.25, since=15))).metrics[0]
    assert (metric.step, metric.name, metric.found - metric.expected) == (15, "loss", 0.25)


def test_a_difference_before_the_fault_comes_first() -> None:
    comparison = compared(Course(before=lines(1, 12, add=0.1), after=lines(13, 20)))
    assert comparison.metrics[0].step == 1


def test_a_run_whose_second_attempt_begins_at_the_first_step_starts_over() -> None:
    assert compared(resumed(lines(1, 20))).starts_over
    assert not compared(resumed(lines(9, 20))).starts_over


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
