from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.batch.scaling import learning_rate_at
from hpcddp.jobfile.sections import LearningRate


def rates(steps_per_epoch: int, epochs: int, **fields: Any) -> list[float]:
    spec = LearningRate(**fields)
    steps = range(steps_per_epoch * epochs)
    return [learning_rate_at(spec, step=step, steps_per_epoch=steps_per_epoch, epochs=epochs) for step in steps]


def test_a_constant_rate_stays() -> None:
    assert rates(5, 2, base=0.3) == [0.3] * 10


def test_the_warm_up_rises_evenly_and_ends_on_the_base() -> None:
    assert rates(4, 2, base=0.8, warmup_epochs=1.0) == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8, 0.8, 0.8])


def test_a_warm_up_of_a_part_of_a_step_never_passes_the_base() -> None:
    assert rates(5, 1, base=1.0, warmup_epochs=0.5) == pytest.approx([0.4, 0.8, 1.0, 1.0, 1.0])


def test_cosine_begins_at_the_base_and_nears_the_minimum() -> None:
    found = rates(4, 2, base=1.0, schedule="cosine", min=0.2)
    expected = [0.2 + 0.8 * (1 + math.cos(math.pi * step / 8)) / 2 for step in range(8)]
    assert found == pytest.approx(expected)


def test_cosine_begins_after_the_warm_up() -> None:
    found = rates(4, 3, base=1.0, schedule="cosine", warmup_epochs=1.0)
    assert found[3:5] == [1.0, 1.0]
    assert found[8] == pytest.approx(0.5)


def test_milestones_multiply_at_the_beginning_of_their_epochs() -> None:
    found = rates(2, 4, base=1.0, schedule="step", milestones=(1, 3), gamma=0.1)
    assert found == pytest.approx([1.0, 1.0, 0.1, 0.1, 0.1, 0.1, 0.01, 0.01])


def test_milestones_do_not_go_below_the_minimum() -> None:
    assert rates(1, 3, base=1.0, schedule="step", milestones=(1, 2), gamma=0.1, min=0.05) == [1.0, 0.1, 0.05]


def test_a_warm_up_longer_than_the_training_only_rises() -> None:
    found = rates(2, 2, base=1.0, schedule="cosine", warmup_epochs=4.0)
    assert found == pytest.approx([1 / 8, 2 / 8, 3 / 8, 4 / 8])


@pytest.mark.parametrize("warmup", [0.0, 1.0, 3.0])
def test_cosine_stays_at_its_minimum_beyond_the_end(warmup: float) -> None:
    spec = LearningRate(base=1.0, schedule="cosine", warmup_epochs=warmup, min=0.2)
    found = [learning_rate_at(spec, step=step, steps_per_epoch=4, epochs=3) for step in (12, 13, 100)]
    assert found == pytest.approx([0.2] * 3)


@given(
    schedule=st.sampled_from(["constant", "cosine", "step"]),
    warmup=st.floats(0, 4),
    steps_per_epoch=st.integers(1, 20),
    epochs=st.integers(1, 4),
)
def test_a_rate_stays_between_zero_and_the_base(
    schedule: str, warmup: float, steps_per_epoch: int, epochs: int
) -> None:
    found = rates(steps_per_epoch, epochs, base=0.7, schedule=schedule, warmup_epochs=warmup, milestones=(1, 2))
    assert all(0 < rate <= 0.7 + 1e-15 for rate in found)


@pytest.mark.parametrize("epoch", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["cosine", "step"])
def test_the_decay_depends_on_the_epoch_and_not_on_its_number_of_steps(schedule: Any, epoch: int) -> None:
    spec = LearningRate(base=0.5, schedule=schedule, warmup_epochs=1.0, milestones=(2, 3))
    few, many = (learning_rate_at(spec, step=epoch * s, steps_per_epoch=s, epochs=4) for s in (10, 1000))
    assert few == pytest.approx(many)
