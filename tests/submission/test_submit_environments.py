"""Environments on this machine: real processes in a real virtual environment and a real uv project."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.submission.submitting import virtual

pytestmark = pytest.mark.depends_on(
    "hpcddp/script", "hpcddp/submission", "hpcddp/task", "templates", "tests/submission/test_submit_environments.py"
)

SEE = """
import json, os, shutil, sys
from pathlib import Path

seen = {"prefix": sys.prefix, "python": shutil.which("python"), "words": sys.argv[1:]}
Path(f"seen-{os.environ['RANK']}.json").write_text(json.dumps(seen))
"""
PROJECT = '[project]\nname = "p"\nversion = "1"\nrequires-python = ">=3.11"\n'
JOB = """
name: here
resources: {tasks_per_node: 2}
environment: {ENVIRONMENT}
command: [python, see.py, "it's $HOME", ""]
"""


@pytest.mark.parametrize(("field", "place"), [("venv", "my venv"), ("uv", "my project/.venv")])
def test_every_task_on_this_machine_runs_in_the_environment(here: Path, field: str, place: str) -> None:
    Path("see.py").write_text(SEE)
    if field == "uv":
        Path("my project").mkdir()
        Path("my project/pyproject.toml").write_text(
            '[project]\nname = "p"\nversion = "1"\nrequires-python = ">=3.11"\n'
        )
    environment = virtual(here / "project" / place)
    Path("job.yaml").write_text(JOB.replace("ENVIRONMENT", f"{field}: {place.removesuffix('/.venv')}"))
    variables = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    done = subprocess.run(
        [sys.executable, "-m", "hpcddp", "submit", "job.yaml", "--cluster", "local", "--follow", "--json"],
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        seen = json.loads(Path(f"seen-{rank}.json").read_text())
        assert seen == {
            "prefix": str(environment),
            "python": str(environment / "bin" / "python"),
            "words": ["it's $HOME", ""],
        }


def test_uv_run_among_the_tasks_leaves_the_environment_as_it_is(here: Path) -> None:
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert uv is not None, "uv is one of the tools of the group dev"
    project = here / "project"
    (project / "pyproject.toml").write_text(f'{PROJECT}dependencies = ["not-there-at-all"]\n')
    environment = virtual(project / ".venv")
    command = f"[{uv}, run, --offline, python, -c, 'import sys; print(sys.prefix, flush=True)']"
    Path("job.yaml").write_text(f"name: here\nenvironment: {{uv: .}}\ncommand: {command}\n")
    done = subprocess.run(
        [sys.executable, "-m", "hpcddp", "submit", "job.yaml", "--cluster", "local", "--follow", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    log = Path(json.loads(done.stdout)["run_dir"]) / "attempts" / "0" / "rank-0.log"
    assert str(environment) in log.read_text().splitlines()
