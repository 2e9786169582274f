"""``hpcddp rehearse`` with the faults of a real Slurm, and with the sandbox in place of a cluster."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.cluster.sandbox import Sandbox
from tests.command_line import hpcddp

PROGRAM = Path(__file__).parents[1] / "rehearse" / "light_program.py"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    directory = tmp_path / "project"
    directory.mkdir()
    shutil.copy(PROGRAM, directory / "program.py")
    return directory


@pytest.mark.long("starts a Slurm of its own, and waits for a preemption and a lost node")
def test_a_program_comes_back_from_the_faults_of_slurm(project: Path) -> None:
    faults = ("requeue", "slurm-preemption", "lost-node")
    options = [word for fault in faults for word in ("--fault", fault)]
    words = ("rehearse", "--sandbox", "--json", *options, "--", sys.executable, "program.py", "slowly")
    done = hpcddp(project, *words, timeout_s=900)
    assert done.returncode == 0, done.stdout + done.stderr
    (report,) = json.loads(done.stdout)["rehearsals"]
    assert {fault["fault"]: fault["verdict"] for fault in report["faults"]} == dict.fromkeys(faults, "equal")


def test_a_job_is_requeued_once_on_the_cluster_and_leaves_nothing(sandbox: Sandbox, project: Path) -> None:
    words = ("rehearse", "--cluster", "slurm", "--json", "--yes", "--", sys.executable, "program.py", "slowly")
    done = hpcddp(project, *words, environment=sandbox.environment, timeout_s=600)
    assert done.returncode == 0, done.stdout + done.stderr
    (report,) = json.loads(done.stdout)["rehearsals"]
    assert [(fault["fault"], fault["verdict"]) for fault in report["faults"]] == [("requeue", "equal")]
    assert sorted(path.name for path in project.iterdir()) == ["program.py"]
    assert sandbox.run("squeue", "--noheader").stdout == ""


def test_jobs_go_to_the_cluster_only_with_a_yes(sandbox: Sandbox, project: Path) -> None:
    words = ("rehearse", "--cluster", "slurm", "--", sys.executable, "program.py")
    done = hpcddp(project, *words, environment=sandbox.environment)
    assert done.returncode == 2
    assert "--yes" in done.stderr
    assert not (project / "runs").exists()
