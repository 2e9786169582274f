"""Which code the attempts of a job run on the real Slurm, when the project is edited before each of its requeues."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcddp.run.directory import RunDirectory
from hpcddp.run.events import read_events
from tests.cluster.jobs import result_of, submit
from tests.cluster.sandbox import Sandbox
from tests.submission.git_projects import make_project

# Its user edits the project while an attempt runs; the job is then requeued.
TRAIN = """
import os, sys, time, version
from pathlib import Path
attempt = int(os.environ["HPCDDP_ATTEMPT"])
print("ran version", version.NUMBER, flush=True)
Path("data/last.ckpt").write_text(str(attempt))
Path("metrics.json").write_text(str(attempt))
with open("steps.csv", "a") as steps:
    steps.write(f"{attempt}\\n")
Path(f"data/started-{attempt}-{os.environ['RANK']}").touch()
# The other rank must have imported the module before it is edited.
while not Path(f"data/started-{attempt}-1").exists():
    time.sleep(0.05)
if os.environ["EDITS"] == "yes" and os.environ["RANK"] == "0":
    (Path(os.environ["PROJECT"]) / "version.py").write_text(f"NUMBER = {attempt + 1}\\n")
Path(os.environ["HPCDDP_PROGRESS_FILE"]).touch()
sys.exit(75 if attempt < int(os.environ["LAST"]) else 0)
"""
FILES = {".gitignore": "data/\nruns/\n", "version.py": "NUMBER = 0\n", "train.py": TRAIN, "steps.csv": "step\n"}


def run_requeued(sandbox: Sandbox, directory: Path, code: str, requeues: int, *, edits: str = "yes") -> RunDirectory:
    """Run a job of two hosts that is requeued so often, and wait for its end."""
    project = make_project(directory / f"{code}-{edits}", FILES)
    (project / "data").mkdir()
    job = {
        "name": "code",
        "command": ["python", "train.py"],
        "environment": {"code": code, "env": {"PROJECT": str(project), "LAST": str(requeues), "EDITS": edits}},
        "resources": {"nodes": 2, "tasks_per_node": 1, "time_limit": 30},
    }
    path = project / "job.yaml"
    path.write_text(json.dumps(job))
    submitted = submit(sandbox, path)
    sandbox.wait(submitted["job_id"], states={"COMPLETED", "FAILED"}, timeout=180 + 30 * requeues)
    return RunDirectory(Path(submitted["run_dir"]))


def versions_of(run: RunDirectory) -> list[str]:
    """Return what version each attempt has run, on both hosts."""
    versions = []
    for number in sorted(run.attempt_numbers()):
        logs = [run.attempt(number).rank_log(rank).read_text() for rank in (0, 1)]
        versions += [log.partition("ran version ")[2][:2].strip() for log in logs]
    return versions


def attempts_told(run: RunDirectory) -> list[int]:
    return [event.attempt for event in read_events(run.events) if event.kind == "code"]


def check(sandbox: Sandbox, directory: Path, requeues: int) -> None:
    live = run_requeued(sandbox, directory, "live", requeues)
    numbers = range(requeues + 1)
    assert versions_of(live) == [str(number) for number in numbers for _ in range(2)]
    assert attempts_told(live) == [*range(1, requeues + 1)]
    assert live.batch_log.read_text().count("version.py changed since the submission") >= requeues
    copied = run_requeued(sandbox, directory, "snapshot", requeues)
    assert versions_of(copied) == ["0"] * 2 * (requeues + 1)
    assert (copied.code_copies / "0" / "steps.csv").read_text().count("\n") == 1 + 2 * (requeues + 1)
    unchanged = run_requeued(sandbox, directory, "live", requeues, edits="no")
    assert versions_of(unchanged) == ["0"] * 2 * (requeues + 1)
    assert attempts_told(unchanged) == []
    for run in (live, copied, unchanged):
        assert result_of(run)["status"] == "finished"


def test_a_requeue_runs_the_edited_code_or_the_copy_as_the_job_says(sandbox: Sandbox, tmp_path: Path) -> None:
    check(sandbox, tmp_path, requeues=1)


def test_frozen_code_that_was_edited_is_not_requeued(sandbox: Sandbox, tmp_path: Path) -> None:
    run = run_requeued(sandbox, tmp_path, "frozen", 1)
    assert versions_of(run) == ["0", "0"]
    result = result_of(run)
    assert (result["status"], result["exit_code"]) == ("stopped", 2)
    assert result["resume"].endswith("--code now")


KILLED = """
import os, signal, time, version
from pathlib import Path
print("ran version", version.NUMBER, flush=True)
if os.environ["HPCDDP_ATTEMPT"] == "0":
    (Path(os.environ["PROJECT"]) / "version.py").write_text("NUMBER = 1\\n")
    Path(f"started-{os.environ['RANK']}").touch()
    if os.environ["RANK"] == "1":
        # srun kills the other rank then.
        while not Path("started-0").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
"""


def test_tasks_that_are_started_again_in_their_job_run_the_copy(sandbox: Sandbox, tmp_path: Path) -> None:
    project = make_project(tmp_path / "project", {**FILES, "train.py": KILLED})
    job = {
        "name": "code",
        "command": ["python", "train.py"],
        "environment": {"code": "snapshot", "env": {"PROJECT": str(project)}},
        "resources": {"nodes": 2, "tasks_per_node": 1, "time_limit": 30},
        "requeue": {"max_failures": 2},
    }
    path = project / "job.yaml"
    path.write_text(json.dumps(job))
    submitted = submit(sandbox, path)
    sandbox.wait(submitted["job_id"], timeout=180)
    run = RunDirectory(Path(submitted["run_dir"]))
    assert versions_of(run) == ["0"] * 4
    assert [event.kind for event in read_events(run.events) if event.kind in {"restart", "requeue"}] == ["restart"]
    assert attempts_told(run) == [1]


@pytest.mark.long
def test_twenty_requeues_run_the_edited_code_or_the_copy_as_the_job_says(sandbox: Sandbox, tmp_path: Path) -> None:
    check(sandbox, tmp_path, requeues=20)
