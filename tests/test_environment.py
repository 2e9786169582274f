"""The environment of the tests (environment.py): what the user, a cluster or an outer job has set does not reach it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OUTSIDE = {
    "SLURM_JOB_ID": "7",
    "SLURM_CONF": "/nonexistent/slurm.conf",
    "SBATCH_PARTITION": "outer",
    "SQUEUE_FORMAT": "%i",
    "SUBMITIT_EXECUTOR": "local",
    "HPCDDP_ATTEMPT_DIR": "/nonexistent",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "192.0.2.1",
    "TORCHELASTIC_RUN_ID": "outer",
    "TORCH_LOGS": "all",
    "OMP_NUM_THREADS": "5",
    "MLFLOW_TRACKING_URI": "http://192.0.2.1",
    "NO_COLOR": "1",
    "COLUMNS": "40",
    "LC_ALL": "C",
    "LINES": "5",
    "PYTHONPATH": "/nonexistent",
    "GIT_DIR": "/nonexistent",
    "UV_PROJECT_ENVIRONMENT": "/nonexistent",
}
# Prints what a test, a fixture of the session and a program that each starts have in their environment.
PROBE = """\
import json, os, subprocess, sys, time
import pytest
from hpcddp.api import profiles_directory
from hpcddp.run.find import index_directory

PROGRAM = [sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]

def started():
    return json.loads(subprocess.run(PROGRAM, check=True, capture_output=True, text=True).stdout)

@pytest.fixture(scope="session")
def seen_by_session():
    return {"process": dict(os.environ), "program": started()}

def test_probe(seen_by_session):
    assert time.localtime(0).tm_hour == 0
    seen = {"session": seen_by_session, "test": {"process": dict(os.environ), "program": started()}}
    assert not profiles_directory(os.environ).exists()
    assert not index_directory().exists()
    profiles_directory(os.environ).mkdir(parents=True)
    index_directory().mkdir(parents=True)
    with open(os.environ["PYTEST_PROBE"], "w") as file:
        json.dump(seen, file)

def test_next():
    assert not profiles_directory(os.environ).exists()
    assert not index_directory().exists()
"""


Variables = dict[str, str]


def _run_probe(directory: Path, **variables: str) -> dict[str, dict[str, Variables]]:
    """Run the probe with the tests' conftest.py; return the variables of each scope: its process's, and a program's."""
    (directory / "test_probe.py").write_text(PROBE)
    answer = directory / "answer.json"
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.conftest",
        f"--rootdir={directory}", "-c", os.devnull, "--import-mode=importlib", "test_probe.py",
    ]  # fmt: skip
    environment = {**os.environ, **OUTSIDE, "PYTHONPATH": str(ROOT), **variables}
    environment |= {"PYTEST_PROBE": str(answer), "TZ": "Asia/Kolkata"}
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen: dict[str, dict[str, Variables]] = json.loads(answer.read_text())
    return seen


def test_no_test_and_no_fixture_of_the_session_has_the_variables_of_the_user_or_of_an_outer_job(tmp_path: Path) -> None:
    profiles = tmp_path / "configuration" / "hpcddp" / "profiles"
    profiles.mkdir(parents=True)
    (profiles / "default.yaml").write_text("resources: {partition: of-the-user}\n")
    homes = {"XDG_CONFIG_HOME": str(tmp_path / "configuration"), "XDG_STATE_HOME": str(tmp_path / "state")}
    scopes = _run_probe(tmp_path, **homes)
    for variables in (*scopes["session"].values(), *scopes["test"].values()):
        assert OUTSIDE.keys() & variables.keys() == set()
        assert all(variables[name] != value for name, value in homes.items())
        assert (variables["PATH"], variables["HOME"]) == (os.environ["PATH"], os.environ["HOME"])


def test_pip_reads_the_users_file_which_may_name_the_only_index_in_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_CONFIG_FILE", raising=False)
    file = tmp_path / "configuration" / "pip" / "pip.conf"
    file.parent.mkdir(parents=True)
    file.touch()
    scopes = _run_probe(tmp_path, XDG_CONFIG_HOME=str(tmp_path / "configuration"))
    assert scopes["test"]["program"]["PIP_CONFIG_FILE"] == str(file)
