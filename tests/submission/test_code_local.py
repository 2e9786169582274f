"""Which code runs on this machine after an edit: real submissions, resumptions and editable installs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcddp.run.code import read_code
from hpcddp.run.directory import RunDirectory
from hpcddp.run.events import read_events
from tests.command_line import hpcddp
from tests.facts import assert_facts
from tests.messages import GoldenMessages
from tests.submission.git_projects import git, make_project, write_files
from tests.submission.local_commands import ended, result, submit

pytestmark = pytest.mark.depends_on(
    "hpcddp/run/code.py",
    "hpcddp/run/git.py",
    "hpcddp/submission/code.py",
    "hpcddp/submission/resume.py",
    "hpcddp/supervise/refusals.py",
    "hpcddp/task/code.py",
    "tests/submission",
)
# Ends with 0 when there is a file in the data.
TRAIN = """
import os, sys, helper, inner
print("ran", helper.WORD, inner.WORD, os.getcwd(), helper.__file__)
sys.exit(0 if os.path.exists("data/ready") else 1)
"""
FILES = {".gitignore": "data/\nruns/\n", "train.py": TRAIN, "helper.py": "WORD = 'one'\n", "src/inner.py": "WORD = 1\n"}
EDITED = {"helper.py": "WORD = 'two'\n", "src/inner.py": "WORD = 2\n"}
COMMAND = ("--", sys.executable, "train.py")
SNAPSHOT = ("--set", "environment.code=snapshot")
# A copy has src on the import path by itself.
SEARCH = ("--set", "environment.env.PYTHONPATH=src")
FROZEN = ("--set", "environment.code=frozen", *SEARCH)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    project = make_project(tmp_path / "project", FILES)
    write_files(project, {"data/x": ""})
    return project


def log_of(run: RunDirectory, attempt: int) -> str:
    return run.attempt(attempt).rank_log(0).read_text()


def resume(project: Path, run: RunDirectory, *words: str, code: int = 0) -> str:
    """Resume a run to its end, and return what the command printed as errors."""
    as_json = ("--json",) if code == 0 else ()
    done = hpcddp(project, "submit", "--resume", run.path, *as_json, *words)
    assert done.returncode == code, done.stdout + done.stderr
    if code == 0:
        ended(json.loads(done.stdout))
    return done.stderr


def test_an_edit_does_not_reach_a_copy_until_its_user_says_so(project: Path, golden: GoldenMessages) -> None:
    run = ended(submit(project, *SNAPSHOT, *COMMAND))
    assert f"ran one 1 {run.code_copies}/0 {run.code_copies}/0/helper.py" in log_of(run, 0)
    write_files(project, EDITED)
    refused = resume(project, run, code=2)
    assert_facts(golden.message(refused), "helper.py and src/inner.py changed", "--code now", "--code submitted")
    assert run.newest_attempt() == 0
    resume(project, run, "--code", "submitted")
    assert "ran one 1" in log_of(run, 1)
    write_files(project, {"data/ready": ""})
    resume(project, run, "--code", "now")
    assert f"ran two 2 {run.code_copies}/1" in log_of(run, 2)
    assert [path.name for path in run.code_copies.iterdir()] == ["1"]
    assert result(run)["status"] == "finished"


def test_a_resumption_that_is_refused_keeps_the_copy_and_its_record(project: Path) -> None:
    run = ended(submit(project, *SNAPSHOT, *COMMAND))
    record = run.code.read_bytes()
    write_files(project, EDITED)
    resume(project, run, "--code", "now", "--set", "resources.nodes=2", code=2)
    assert run.code.read_bytes() == record
    assert [path.name for path in run.code_copies.iterdir()] == ["0"]


def test_frozen_code_goes_on_when_its_user_says_so_or_undoes_the_edit(project: Path, golden: GoldenMessages) -> None:
    run = ended(submit(project, *FROZEN, *COMMAND))
    write_files(project, EDITED)
    assert_facts(golden.message(resume(project, run, code=2)), "environment.code is frozen", "--code now")
    golden.message(resume(project, run, "--code", "submitted", code=2))
    write_files(project, {name: FILES[name] for name in EDITED})
    resume(project, run)
    assert "ran one" in log_of(run, 1)
    write_files(project, EDITED)
    resume(project, run, "--code", "now")
    assert "ran two" in log_of(run, 2)
    assert not [event for event in read_events(run.events) if event.kind == "code"]


def test_a_live_run_is_resumed_with_the_code_of_now(project: Path, golden: GoldenMessages) -> None:
    run = ended(submit(project, *SEARCH, *COMMAND))
    write_files(project, EDITED)
    golden.message(resume(project, run, "--code", "submitted", code=2))
    resume(project, run)
    assert "ran two 2" in log_of(run, 1)
    assert not [event for event in read_events(run.events) if event.kind == "code"]


def test_a_run_changes_to_a_copy_when_it_is_resumed(project: Path) -> None:
    run = ended(submit(project, *COMMAND))
    resume(project, run, *SNAPSHOT)
    assert f"{run.code_copies}/0" in log_of(run, 1)


def test_the_option_belongs_to_a_resumption(project: Path, golden: GoldenMessages) -> None:
    done = hpcddp(project, "submit", "--cluster", "local", "--code", "now", *COMMAND)
    assert done.returncode == 2
    golden.message(done.stderr)


def test_a_sweep_has_one_copy(project: Path) -> None:
    words = ("--sweep", "x=1,2", *SNAPSHOT, "--max-parallel", "2", *COMMAND, "{x}")
    sweep: dict[str, Any] = submit(project, *words)
    runs = [ended(element) for element in sweep["elements"]]
    copy = f"{sweep['sweep_dir']}/code/0"
    for run in runs:
        assert f"ran one 1 {copy}" in log_of(run, 0)
        assert not run.code.exists()
        assert not run.code_copies.exists()
    write_files(project, EDITED)
    done = hpcddp(project, "submit", "--resume", sweep["sweep_dir"])
    assert (done.returncode, "--code now" in done.stderr) == (2, True)
    resume(project, runs[0], "--code", "now")
    assert f"ran two 2 {runs[0].code_copies}/0" in log_of(runs[0], 1)
    done = hpcddp(project, "submit", "--resume", sweep["sweep_dir"], "--json", "--code", "now")
    assert done.returncode == 0, done.stderr
    for run, element in zip(runs, json.loads(done.stdout)["elements"], strict=True):
        ended(element)
        assert f"ran two 2 {sweep['sweep_dir']}/code/1" in log_of(run, run.newest_attempt() or 0)
        assert not run.code.exists()


def test_the_tasks_work_in_the_directory_of_submission_of_the_copy(project: Path) -> None:
    write_files(project, {"data/ready": "", "part/notes.txt": ""})
    (project / "part" / "data").symlink_to("../data")
    git(project, "add", ".")
    run = ended(submit(project / "part", *SNAPSHOT, "--", sys.executable, "../train.py"))
    assert result(run)["status"] == "finished"
    assert f"{run.code_copies}/0/part {run.code_copies}/0/helper.py" in log_of(run, 0)


def test_an_element_of_the_search_path_in_the_project_is_that_of_the_copy(project: Path) -> None:
    write_files(project, {"lib/third.py": "print('third is', __file__)\n", "train.py": "import third\n"})
    path = ("--set", f"environment.env.PYTHONPATH={project}/lib")
    run = ended(submit(project, *SNAPSHOT, *path, *COMMAND))
    assert f"third is {run.code_copies}/0/lib/third.py" in log_of(run, 0)


def installed_in(project: Path, lines: str) -> Path:
    """Return the Python of an environment in which a project is installed as ``pip install -e`` does it."""
    environment = project.parent / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (packages,) = environment.glob("lib/python3*/site-packages")
    (packages / "project.pth").write_text(lines)
    return environment / "bin" / "python"


def test_a_project_that_is_installed_from_its_source_runs_from_the_copy(project: Path) -> None:
    python = installed_in(project, f"{project}\n{project}/src\n")
    write_files(project, {"data/ready": "", "scripts/go.py": TRAIN.replace('os.path.exists("data/ready")', "True")})
    run = ended(submit(project, *SNAPSHOT, "--", str(python), "scripts/go.py"))
    assert f"{run.code_copies}/0/helper.py" in log_of(run, 0)
    assert result(run)["status"] == "finished"


def test_a_module_that_would_be_imported_from_the_project_is_refused(project: Path) -> None:
    python = installed_in(project, f"{project}/lib\n")
    write_files(project, {"lib/hidden/__init__.py": "", "train.py": "import hidden\nprint('ran')\n"})
    run = ended(submit(project, *SNAPSHOT, "--", str(python), "train.py"))
    assert result(run)["status"] == "failed"
    # It is cut after a number of characters, so that its end depends on the length of the path.
    assert_facts(result(run)["reason"], "module hidden", f"{project}/lib/hidden/__init__.py", "src")
    assert "\nran" not in log_of(run, 0)


ENTRYPOINT = """
import helper
def main(context):
    print("ran", helper.WORD, helper.__file__)
"""


def test_an_entrypoint_runs_from_the_copy_and_a_module_of_the_project_is_refused(project: Path) -> None:
    write_files(project, {"job.py": ENTRYPOINT, "lib/hidden.py": "print('hidden ran')\n"})
    write_files(project, {"job.yaml": "name: demo\nentrypoint: job:main\n"})
    words = (*SNAPSHOT, "job.yaml")
    run = ended(submit(project, *words))
    assert result(run)["status"] == "finished", log_of(run, 0)
    assert f"ran one {run.code_copies}/0/helper.py" in log_of(run, 0)
    search = f"import sys\nsys.path.append({str(project / 'lib')!r})\n"
    write_files(project.parent, {"elsewhere/sitecustomize.py": search})
    run = ended(submit(project, *words, "--set", f"environment.env.PYTHONPATH={project.parent}/elsewhere"))
    assert result(run)["status"] == "failed"
    assert_facts(result(run)["reason"], "module hidden", f"{project}/lib/hidden.py")
    assert "hidden ran" not in log_of(run, 0)


def test_a_copy_that_somebody_removed_is_told(project: Path) -> None:
    run = ended(submit(project, *SNAPSHOT, *COMMAND))
    shutil.rmtree(run.code_copies)
    write_files(project, {"data/ready": ""})
    resume(project, run)
    assert result(run)["status"] == "finished"
    code = read_code(run)
    assert code is not None
    assert code.copy is not None
    assert code.copy.is_dir()


def test_a_dry_run_refuses_what_a_submission_refuses(project: Path) -> None:
    words = ("submit", "--cluster", "local", "--dry-run", *SNAPSHOT, "--", "python", f"{project}/train.py")
    done = hpcddp(project, *words)
    assert (done.returncode, "absolute path into the project" in done.stderr) == (2, True)
    assert not (project / "runs").exists()


def test_data_that_is_copied_to_the_nodes_is_that_of_the_project(project: Path, tmp_path: Path) -> None:
    show = "import os\nprint('staged', os.listdir(os.environ['HPCDDP_STAGED']))\n"
    write_files(project, {"data/ready": "", "train.py": show})
    stage = ("--set", f"environment.stage={{source: {project}/data, target: {tmp_path}/disk}}")
    run = ended(submit(project, *SNAPSHOT, *stage, *COMMAND))
    assert "ready" in log_of(run, 0).partition("staged")[2]
