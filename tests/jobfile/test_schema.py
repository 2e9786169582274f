from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ruamel.yaml import YAML

from hpcddp.jobfile.job import field_paths
from hpcddp.jobfile.schema import job_schema

JOBS = Path(__file__).parents[2] / "jobs"
GOOD: dict[str, Any] = {
    "name": "a",
    "batch": {"global_batch_size": 8},
    "train": {"model": "resnet18", "dataset": "digits"},
}


def validator() -> Any:
    jsonschema.Draft202012Validator.check_schema(job_schema())
    return jsonschema.Draft202012Validator(job_schema())


@pytest.mark.parametrize("file", sorted(JOBS.glob("*.yaml")), ids=lambda file: file.name)
def test_the_job_files_of_the_project_fit_the_schema(file: Path) -> None:
    validator().validate(YAML(typ="safe", pure=True).load(file.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "more",
    [
        {"resources": {"time_limit": 90, "mem": 0, "sbatch": {"switches": 1, "overcommit": True}}},
        {"resources": {"time_limit": "1-12:30", "mem_per_cpu": "4G"}},
        {"checkpoint": {"every": {"steps": 5}}},
        {"checkpoint": {"every": "90s"}},
        {"environment": {"env": {"A": "1"}, "pass_env": ["B"]}},
        {"train": {"model": "a.b:c", "dataset": "d:e"}},
        {"profile": None, "sweep": None},
    ],
)
def test_good_values_fit_the_schema(more: dict[str, Any]) -> None:
    validator().validate({**GOOD, **more})


@pytest.mark.parametrize(
    "more",
    [
        {"resorces": {}},
        {"resources": {"nodes": 0}},
        {"resources": {"mem": 64}},
        {"resources": {"sbatch": {"Bad": 1}}},
        {"environment": {"env": {"1A": "x"}}},
        {"environment": {"env": {"A": 1}}},
        {"checkpoint": {"every": {"steps": 5, "epochs": 1}}},
        {"checkpoint": {"every": "10"}},
        {"train": {"model": "ResNet18", "dataset": "digits"}},
        {"batch": {"global_batch_size": 8, "tail": "no"}},
        {"name": "a b"},
    ],
)
def test_bad_values_do_not_fit_the_schema(more: dict[str, Any]) -> None:
    assert not validator().is_valid({**GOOD, **more})


def test_every_field_has_a_description() -> None:
    assert [path for path, field in field_paths() if not field.description] == []
