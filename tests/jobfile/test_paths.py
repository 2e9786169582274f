"""Paths that are expanded when a job is submitted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.problems import JobFileError
from hpcddp.jobfile.read import DefaultSettings, load_job, shared_run_root
from tests.messages import GoldenMessages

SHELL = DefaultSettings(environment={"SCRATCH": "/scratch/me", "HOME": "/home/me", "EMPTY": ""})


def job(**changes: Any) -> dict[str, Any]:
    return {"name": "a", "command": ["true"], **changes}


def resolved(**changes: Any) -> JobSpec:
    return load_job(job(**changes), defaults=SHELL).spec


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("$SCRATCH/runs", "/scratch/me/runs"),
        ("${SCRATCH}/runs", "/scratch/me/runs"),
        ("~/runs", "/home/me/runs"),
        ("$HOME/$SCRATCH", "/home/me//scratch/me"),
        ("runs", "runs"),
        ("a~/b", "a~/b"),
    ],
)
def test_a_run_root_is_expanded_by_whatever_it_is_given(written: str, meant: str) -> None:
    assert resolved(run_root=written).run_root == meant
    assert load_job(job(), overrides=[f"run_root={written}"], defaults=SHELL).spec.run_root == meant


def test_a_run_root_of_the_project_is_expanded_for_commands_without_a_job_too(tmp_path: Path) -> None:
    project = tmp_path / "hpcddp.yaml"
    project.write_text("run_root: $SCRATCH/runs\n")
    assert shared_run_root(DefaultSettings(project=project, environment=SHELL.environment)) == "/scratch/me/runs"
    with pytest.raises(JobFileError, match="SCRATCH is not set"):
        shared_run_root(DefaultSettings(project=project))


@pytest.mark.parametrize("written", ["$MISSING/runs", "${MISSING}/runs", "$EMPTY/runs", "/a/$MISSING"])
def test_a_name_that_is_not_set_is_refused(written: str, golden: GoldenMessages) -> None:
    with pytest.raises(JobFileError) as refused:
        resolved(run_root=written)
    message = golden.message(refused.value)
    assert "is not set here" in message
    assert written in message


@pytest.mark.parametrize("written", ["$(pwd)/runs", "`pwd`$/runs", "~other/runs", "$1/runs"])
def test_what_only_a_shell_expands_is_refused(written: str, golden: GoldenMessages) -> None:
    with pytest.raises(JobFileError) as refused:
        resolved(run_root=written)
    assert "write the whole path" in golden.message(refused.value)


@pytest.mark.parametrize("field", ["venv", "uv", "conda", "python"])
def test_paths_of_the_environment_are_expanded(field: str) -> None:
    spec = resolved(environment={field: "$SCRATCH/env"})
    assert getattr(spec.environment, field) == "/scratch/me/env"


def test_the_data_below_the_disk_of_a_node_is_left_to_the_node() -> None:
    stage = {"source": "$SCRATCH/imagenet.tar", "target": "$SLURM_TMPDIR/imagenet"}
    data = {"dataset": "imagefolder", "data_dir": "$SLURM_TMPDIR/imagenet/jpeg", "num_classes": 10}
    document = {
        "name": "a",
        "batch": {"global_batch_size": 8},
        "learning_rate": {"base": 0.1},
        "train": {"model": "resnet18", **data},
    }
    spec = load_job({**document, "environment": {"stage": stage}}, defaults=SHELL).spec
    assert spec.environment.stage is not None
    assert (spec.environment.stage.source, spec.environment.stage.target) == (
        "/scratch/me/imagenet.tar",
        "$SLURM_TMPDIR/imagenet",
    )
    assert spec.train is not None
    assert spec.train.data_dir == "$SLURM_TMPDIR/imagenet/jpeg"
