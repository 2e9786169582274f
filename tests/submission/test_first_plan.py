"""What is known of the plan when a job is submitted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcddp.batch.job import JobPlan
from hpcddp.jobfile.job import JobSpec
from hpcddp.submission import request as request_module
from hpcddp.submission.checks import check_submittable
from hpcddp.submission.request import first_plan
from hpcddp.submission.submit import submit
from tests.messages import GoldenMessages
from tests.submission.fake_sbatch import make_fake_slurm
from tests.submission.requests import request_of


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
    assert plan is not None
    assert plan.batch.steps_per_epoch == steps
    assert any(note.startswith("The task counts ") for note in plan.notes) == (steps is None)


def test_a_submission_computes_its_plan_once_and_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    planned: list[JobSpec] = []

    def counted(spec: JobSpec) -> JobPlan | None:
        planned.append(spec)
        return first_plan(spec)

    monkeypatch.setattr(request_module, "first_plan", counted)
    document = {"name": "demo", "batch": {"global_batch_size": 8}, "train": {"model": "resnet18", "dataset": "digits"}}
    slurm = make_fake_slurm(tmp_path / "slurm")
    run = submit(request_of(JobSpec.model_validate(document), environment=slurm.environment())).run
    assert len(planned) == 1
    assert json.loads(run.plan.read_text())["global_batch_size"] == 8


def test_a_global_batch_larger_than_the_data_is_told_at_the_submission(golden: GoldenMessages) -> None:
    document = {
        "name": "demo",
        "batch": {"global_batch_size": 4096},
        "train": {"model": "resnet18", "dataset": "digits"},
    }
    (note,) = check_submittable(request_of(JobSpec.model_validate(document), cluster="local"))
    message = golden.message(note)
    assert message.startswith("global_batch_size is 4096, ")
    assert " 1,437 samples, " in message
    assert message.endswith("; write 1437 or less")
