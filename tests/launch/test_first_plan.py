"""What is known of the plan when a job is submitted."""

from __future__ import annotations

from typing import Any

import pytest

from hpcddp.launch.first_plan import first_plan
from hpcddp.spec.job import JobSpec


@pytest.mark.parametrize(
    ("batch", "steps"), [({}, 15), ({"unit": "group", "group": "mine:episode_of"}, None)], ids=["samples", "groups"]
)
def test_samples_of_a_known_dataset_are_no_groups(batch: dict[str, Any], steps: int | None) -> None:
    document = {
        "name": "demo",
        "batch": {"global_batch_size": 100, **batch},
        "train": {"model": "resnet18", "dataset": "digits"},
    }
    plan = first_plan(JobSpec.model_validate(document))
    assert plan.batch.steps_per_epoch == steps
    assert ("The task counts the training data and completes this plan." in plan.notes) == (steps is None)
