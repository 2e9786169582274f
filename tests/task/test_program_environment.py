"""The environment of a program."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from hpcddp.jobfile.job import JobSpec
from hpcddp.run.directory import AttemptDirectory
from hpcddp.slurm.rank_env import RankEnv
from hpcddp.task.program import program_environment

ENV = RankEnv(rank=1, local_rank=1, world_size=2, local_world_size=2, node_rank=0, nodes=1, source="slurm")


def found(
    *,
    inherited: Mapping[str, str],
    environment: Mapping[str, object] | None = None,
    sections: Mapping[str, object] | None = None,
    end_time: float | None = None,
) -> dict[str, str]:
    document = {"name": "a", "command": ["python", "x.py"], "environment": dict(environment or {}), **(sections or {})}
    return program_environment(
        JobSpec.model_validate(document),
        ENV,
        AttemptDirectory(Path("/runs/a/r1/attempts/3")),
        address="10.0.0.1",
        port=20001,
        end_time=end_time,
        inherited=inherited,
        python=Path("/job/bin/python"),
    )


@pytest.mark.parametrize(
    ("inherited", "environment", "path"),
    [
        ({}, {}, "/job/bin:/usr/bin"),
        ({"VIRTUAL_ENV": "/mine"}, {}, "/usr/bin:/job/bin"),
        ({"CONDA_PREFIX": "/mine"}, {}, "/usr/bin:/job/bin"),
        ({}, {"modules": ["python/3.12"]}, "/usr/bin:/job/bin"),
        ({}, {"setup": ["source mine"]}, "/usr/bin:/job/bin"),
        ({}, {"env": {"PATH": "/usr/bin"}}, "/usr/bin:/job/bin"),
    ],
)
def test_python_is_the_jobs_interpreter_unless_the_user_chose_another(
    inherited: dict[str, str], environment: dict[str, object], path: str
) -> None:
    assert found(inherited={"PATH": "/usr/bin", **inherited}, environment=environment)["PATH"] == path


def test_python_is_that_of_the_container_which_a_plugin_of_srun_starts() -> None:
    sections = {"resources": {"srun": {"environment": "torch.toml"}}}
    assert found(inherited={"PATH": "/usr/bin"}, sections=sections)["PATH"] == "/usr/bin:/job/bin"


def test_the_files_of_the_run_and_the_end_of_the_job_are_named() -> None:
    told = found(inherited={}, end_time=1700000000.4)
    assert {name: told[name] for name in told if name.startswith("HPCDDP_")} == {
        "HPCDDP_RUN_ID": "r1",
        "HPCDDP_RUN_DIR": "/runs/a/r1",
        "HPCDDP_ATTEMPT": "3",
        "HPCDDP_REQUEUE_FILE": "/runs/a/r1/attempts/3/requeue",
        "HPCDDP_PROGRESS_FILE": "/runs/a/r1/progress",
        "HPCDDP_METRICS_FILE": "/runs/a/r1/metrics.jsonl",
        "HPCDDP_END_TIME": "1700000000",
    }


def test_python_variables_of_the_user_are_kept() -> None:
    assert found(inherited={})["PYTHONUNBUFFERED"] == "1"
    assert found(inherited={"PYTHONUNBUFFERED": "0"})["PYTHONUNBUFFERED"] == "0"


def test_the_learning_rate_is_the_one_that_the_rule_makes() -> None:
    rate = {"base": 0.1, "base_global_batch_size": 64, "rule": "sqrt"}
    variables = found(inherited={}, sections={"batch": {"global_batch_size": 256}, "learning_rate": rate})
    assert variables["HPCDDP_LEARNING_RATE"] == "0.2"
