from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.batch.explain import explain
from hpcddp.batch.job import JobPlan, plan_numbers
from hpcddp.batch.plan import plan_batch
from hpcddp.jobfile.sections import LearningRate

WHOLE = """\
Step
  global batch     256 samples, over 3 ranks
    rank 0         86 samples = 2 x 29 + 1 x 28
    ranks 1-2      85 samples = 1 x 29 + 2 x 28
  accumulation     3 micro-steps per optimizer step; at most 32 samples per device at once
  imbalance        0.781 %: ranks with 85 samples wait for those with 86; each sample weighs the same

Epoch
  training data    1,281,167 samples
  steps            5,005: 5,004 of 256 samples, then one of 143
  last step        143 samples
    ranks 0-1      48 samples = 3 x 16
    rank 2         47 samples = 2 x 16 + 1 x 15
  tail keep        every sample exactly once

Training
  length           450,450 steps in 90 epochs
  learning rate    unknown

The world size does not matter, except for BatchNorm that is local to a rank: the gradient of a step
is the mean over the samples of its global batch, each with the same weight, however many ranks
share them. Another number of ranks changes the split and the speed, and neither the global batches,
nor the steps, nor the learning rate.

Another global batch does matter, through kappa, and no rule is universal: which one holds, and up
to which batch, differs between models, data and optimizers (Shallue et al. 2019). Compare a few
rates at the new batch.
"""


def text(*, epochs: int | None = 1, learning_rate: float | None = 0.1, **numbers: Any) -> str:
    batch = plan_batch(**{"global_batch_size": 256, "world_size": 4, "samples": 1024, **numbers})
    return explain(plan_numbers(batch, epochs=epochs, learning_rate=learning_rate))


def test_the_whole_text_of_the_imagenet_example() -> None:
    found = text(world_size=3, samples=1_281_167, max_per_device_batch_size=32, epochs=90, learning_rate=None)
    assert found == WHOLE


def test_an_even_plan_has_no_imbalance_and_no_notes() -> None:
    found = text()
    assert "    ranks 0-3      64 samples\n" in found
    assert "imbalance        none: every rank has the same" in found
    assert "steps            4 of 256 samples" in found
    assert "Notes" not in found
    assert "last step" not in found


@pytest.mark.parametrize(
    ("numbers", "line"),
    [
        ({"samples": 1000, "tail": "drop"}, "every sample once, except 232 that"),
        ({"samples": 1000, "tail": "wrap"}, "every sample, and 24 repeated"),
        ({"samples": None}, "training data    unknown number of samples"),
        ({"samples": 200}, "steps            1 of 200 samples"),
        ({"max_per_device_batch_size": 4}, "64 samples = 16 x 4"),
        ({"max_per_device_batch_size": 9}, "64 samples = 8 x 8"),
        ({"max_per_device_batch_size": 7}, "64 samples = 4 x 7 + 6 x 6"),
        ({"grad_accum_steps": 2}, "2 micro-steps per optimizer step; no limit"),
        ({"global_batch_size": 10_001, "world_size": 10_000, "samples": None}, "imbalance        100 %: ranks with 1 "),
        ({"epochs": None}, "length           an unknown number of epochs"),
        ({"samples": None, "epochs": 3}, "length           3 epochs"),
    ],
)
def test_each_case_says_what_it_is(numbers: dict[str, Any], line: str) -> None:
    assert line in text(**numbers)


@pytest.mark.parametrize(
    ("schedule", "course"),
    [
        (LearningRate(), "0.1, constant"),
        (
            LearningRate(warmup_epochs=5.0, schedule="cosine"),
            "0.1, after a linear warm-up (epochs: 5), falling on a cosine to 0",
        ),
        (
            LearningRate(warmup_epochs=0.5, schedule="step", milestones=(30, 60)),
            "0.1, after a linear warm-up (epochs: 0.5), times 0.1 at the beginning of epochs 30, 60",
        ),
        (LearningRate(schedule="step"), "0.1, times 0.1 at the beginning of epochs (none)"),
    ],
)
def test_the_course_of_the_learning_rate_is_told(schedule: LearningRate, course: str) -> None:
    batch = plan_batch(global_batch_size=256, world_size=4, samples=1024)
    found = explain(JobPlan(batch=batch, epochs=90, learning_rate=0.1, schedule=schedule))
    assert f"  learning rate    {course}\n" in found


@given(batch=st.integers(1, 10**5), world=st.integers(1, 300), samples=st.none() | st.integers(1, 10**18))
def test_the_text_is_short_for_every_plan(batch: int, world: int, samples: int | None) -> None:
    found = text(global_batch_size=max(batch, world), world_size=world, samples=samples, max_per_device_batch_size=7)
    assert len(found.splitlines()) < 50
