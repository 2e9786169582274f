"""Job files that the tests on the real Slurm submit, and what came of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcddp.run.directory import RunDirectory
from tests.cluster.sandbox import Sandbox

HPCDDP = (sys.executable, "-m", "hpcddp")


def write_job(
    directory: Path,
    *,
    model: str = "small:build",
    nodes: int = 2,
    tasks: int = 1,
    epochs: int = 2,
    python: str = sys.executable,
    name: str = "job.yaml",
    sections: Mapping[str, Mapping[str, Any]] | None = None,
) -> Path:
    """Write the job file of a small training and return it.

    Args:
        directory: where it goes, beside the model's module.
        model: the model's ``module:function``.
        nodes: hosts.
        tasks: ranks on each.
        epochs: how long it trains.
        python: the tasks' interpreter.
        name: the file's name.
        sections: what is laid over sections of the job file.
    """
    job: dict[str, Any] = {
        "name": "digits",
        "resources": {"nodes": nodes, "tasks_per_node": tasks, "cpus_per_task": 1, "time_limit": 20},
        "environment": {"python": python},
        "batch": {"global_batch_size": 64},
        "learning_rate": {"base": 0.1},
        "train": {"model": model, "dataset": "digits", "epochs": epochs, "precision": "fp64"},
        "launch": {"rendezvous_timeout": "3min"},
        "trackers": {"use": []},
    }
    for section, fields in (sections or {}).items():
        job[section] = {**job.get(section, {}), **fields}
    path = directory / name
    # JSON is YAML.
    path.write_text(json.dumps(job, indent=2))
    return path


def submit(sandbox: Sandbox, job: Path, *options: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    """Submit a job file from its own directory and return what ``hpcddp submit --json`` says."""
    done = sandbox.run(*HPCDDP, "submit", str(job), "--json", *options, cwd=job.parent, env=env)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def finished(sandbox: Sandbox, job_id: str) -> dict[str, str]:
    """Wait until a job has ended well."""
    return sandbox.wait(job_id, states={"COMPLETED"}, timeout=300)


def result_of(run: RunDirectory) -> dict[str, Any]:
    """Return a run's result."""
    result: dict[str, Any] = json.loads(run.result.read_text())
    return result
