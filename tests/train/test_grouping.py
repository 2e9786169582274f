"""Groups of samples, named by a function of the user's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hpcddp.batch.refusals import PlanError
from hpcddp.train.errors import ResumeError, UserCodeError
from tests.distributed.training import steps
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
    ("function", "sentence"),
    [
        ("half_a_group", "which returned a float for sample 0; return the group's number or its name, an int or a str"),
        ("yes_or_no", "which returned a bool for sample 0; return the group's number or its name, an int or a str"),
        ("fails_at_three", f"batch.group is {HERE}:fails_at_three, which failed at sample 3: KeyError: 3"),
        ("missing", "has no such name; write the name of a function in it"),
    ],
)
def test_failure_of_the_users_function_is_named(training: Training, function: str, sentence: str) -> None:
    with pytest.raises(UserCodeError) as caught:
        training.train(**GROUPS, batch__group=f"{HERE}:{function}")
    assert sentence in caught.value.message


def test_names_may_be_texts_or_whole_numbers_of_any_kind(training: Training) -> None:
    training.train(**GROUPS, batch__group=f"{HERE}:numpy_fives")
    assert [record["samples_seen"] for record in steps(training.run.path)] == [20, 40]
    assert "  global batch 4 groups = per rank 1 x 4, in 1 micro-step of at most 4" in training.said


def test_a_single_group_of_one_sample_is_too_little_for_batch_norm(training: Training) -> None:
    model: dict[str, Any] = {"train__model": "tests.distributed.grouped_code:ghost_model"}
    with pytest.raises(PlanError, match="one group in micro-step 0, some groups have one sample, and BatchNorm has no"):
        training.train(
            **GROUPS | {"batch__global_batch_size": 2},
            **model,
            batch__grad_accum_steps=2,
            batch__group=f"{HERE}:three_alone",
        )


def test_resume_with_other_groups_is_refused(training: Training) -> None:
    every: dict[str, Any] = {"checkpoint": {"every": {"steps": 1}}}
    training.crash(steps=1, **GROUPS, **every, batch__group=f"{HERE}:fives")
    with pytest.raises(ResumeError, match="with the fingerprint of the training data"):
        training.train(attempt=1, **GROUPS, **every, batch__group=f"{HERE}:three_alone")
    samples = {name: value for name, value in GROUPS.items() if name != "batch__unit"}
    with pytest.raises(ResumeError, match=r"with batch\.unit group, and now it is sample, so that"):
        training.train(attempt=2, **samples, **every)
    training.train(attempt=3, **GROUPS, **every, batch__group=f"{HERE}:fives")
    assert steps(training.run.path)[-1]["samples_seen"] == 40
