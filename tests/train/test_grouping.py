"""Groups of samples, named by a function of the user's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hpcddp.batch.plan import PlanError
from hpcddp.train.errors import ResumeError, UserCodeError
from tests.distributed.training import steps
from tests.messages import GoldenMessages
from tests.train.conftest import Training

HERE = "tests.train.test_grouping"
GROUPS: dict[str, Any] = {
    "batch__unit": "group",
    "batch__global_batch_size": 4,
    "train__dataset_args": {"train": 40, "val": 8},
}


def fives(index: int) -> str:
    return f"patient {index // 5}"


def numpy_fives(index: int) -> np.int64:
    return np.int64(index // 5)


def half_a_group(index: int) -> float:
    return index / 2


def yes_or_no(index: int) -> bool:
    return index > 3


def fails_at_three(index: int) -> int:
    return {0: 0, 1: 0, 2: 0}[index]


def three_alone(index: int) -> int:
    return min(index, 3)


@pytest.mark.parametrize(
    ("function", "facts"),
    [
        ("half_a_group", ("returned a float for sample 0", "an int or a str")),
        ("yes_or_no", ("returned a bool for sample 0", "an int or a str")),
        ("fails_at_three", ("failed at sample 3: KeyError: 3",)),
        ("missing", ("has no such name", "write the name of a function")),
    ],
)
def test_failure_of_the_users_function_is_named(
    golden: GoldenMessages, training: Training, function: str, facts: tuple[str, ...]
) -> None:
    with pytest.raises(UserCodeError) as caught:
        training.train(**GROUPS, batch__group=f"{HERE}:{function}")
    message = golden.message(caught.value, {__file__: "FILE"})
    for fact in (f"batch.group is {HERE}:{function}", *facts):
        assert fact in message


def test_names_may_be_texts_or_whole_numbers_of_any_kind(golden: GoldenMessages, training: Training) -> None:
    training.train(**GROUPS, batch__group=f"{HERE}:numpy_fives")
    assert [record["samples_seen"] for record in steps(training.run.path)] == [20, 40]
    (line,) = (line for line in training.said if "  global batch " in line)
    assert "4 groups, over 1 rank" in golden.message(line)


def test_a_single_group_of_one_sample_is_too_little_for_batch_norm(golden: GoldenMessages, training: Training) -> None:
    model: dict[str, Any] = {"train__model": "tests.distributed.grouped_code:ghost_model"}
    with pytest.raises(PlanError) as caught:
        training.train(
            **GROUPS | {"batch__global_batch_size": 2},
            **model,
            batch__grad_accum_steps=2,
            batch__group=f"{HERE}:three_alone",
        )
    message = golden.message(caught.value)
    assert "rank 0 one group in micro-step 0" in message
    assert "some groups have one sample" in message
    assert "use global_batch_size 4 or a model without" in message


def test_resume_with_other_groups_is_refused(golden: GoldenMessages, training: Training) -> None:
    every: dict[str, Any] = {"checkpoint": {"every": {"steps": 1}}}
    training.crash(steps=1, **GROUPS, **every, batch__group=f"{HERE}:fives")
    with pytest.raises(ResumeError, match="with the fingerprint of the training data"):
        training.train(attempt=1, **GROUPS, **every, batch__group=f"{HERE}:three_alone")
    samples = {name: value for name, value in GROUPS.items() if name != "batch__unit"}
    with pytest.raises(ResumeError) as caught:
        training.train(attempt=2, **samples, **every)
    message = golden.message(caught.value)
    assert "batch.unit group" in message
    assert "now it is sample" in message
    training.train(attempt=3, **GROUPS, **every, batch__group=f"{HERE}:fives")
    assert steps(training.run.path)[-1]["samples_seen"] == 40
