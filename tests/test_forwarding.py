"""Jobs and runs of hpcddp 0.1.0 under this version: ``tests/golden/0.1.0`` holds what that version wrote.

``training.sh`` and ``command.sh`` are its scripts of two local jobs, and ``stopped_run`` is a run of the first one that
was stopped after step 48 of 69.
"""

from __future__ import annotations

import json
import os
import pickletools
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from hpcddp.run.directory import RunDirectory
from hpcddp.run.moved import ScriptRunDirectory, moved_script
from hpcddp.submission.executors import dump_call

GOLDEN = Path(__file__).parent / "golden" / "0.1.0"
MODEL = """
from torch import nn

def build(num_classes):
    return nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(48, num_classes))
"""
# Of the run that version 0.1.0 trained from the first to the last step.
FINAL_LOSS = 0.9073752039966638
FORWARDED = {
    "hpcddp.launch.attempt": "hpcddp.supervise.__main__",
    "hpcddp.launch.task": "hpcddp.task.__main__",
    "hpcddp.launch.siblings": "hpcddp.task.local_peers",
    "hpcddp.launch.work": "hpcddp.task.work",
}
_TIMEOUT_S = 120


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "HPCDDP"))}


def python(*words: str, text: str = "", **variables: str) -> tuple[int, str, str]:
    """Run an interpreter, and return its exit code and its output."""
    done = subprocess.run(
        [sys.executable, "-P", *words],
        env={**environment(), **variables},
        input=text,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def script_of(name: str) -> str:
    """Return a script of version 0.1.0 that names the interpreter of the tests."""
    return (GOLDEN / f"{name}.sh").read_text().replace("/opt/hpcddp/bin/python", sys.executable)


def records(run: RunDirectory) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return [record for record in lines if "loss" in record]


def submitted_run(project: Path, name: str, script: str) -> RunDirectory:
    """Write what ``submit`` of version 0.1.0 wrote before it started a local job."""
    run = RunDirectory(project / "runs" / name / "r1")
    run.submitit.mkdir(parents=True)
    for directory in (run.path.parent, run.path, run.submitit):
        directory.chmod(0o700)
    run.script.write_text(script)
    run.job_file.write_text(script.partition("<<'HPCDDP_JOB'\n")[2].partition("HPCDDP_JOB\n")[0])
    return run


def run_to_its_end(project: Path, run: RunDirectory) -> int:
    """Start a local job as ``submit`` of version 0.1.0 did, wait for its end and return its exit code."""
    pickle = run.submitit / "call.pkl"
    digest = dump_call(pickle, import_module("hpcddp.launch.work").run, str(run.path))
    names = [argument for _, argument, _ in pickletools.genops(pickle.read_bytes())]
    assert "hpcddp.launch.work" in names
    assert "hpcddp.task.work" not in names
    controller: Mapping[str, str] = {
        "SUBMITIT_EXECUTOR": "local",
        "SUBMITIT_LOCAL_COMMAND": f"{sys.executable} -P -u -m hpcddp.launch.task",
        "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
        "SUBMITIT_LOCAL_NODEID": "0",
        "SUBMITIT_LOCAL_NTASKS": "2",
        "SUBMITIT_LOCAL_SIGNAL_DELAY_S": "30",
        "SUBMITIT_LOCAL_TIMEOUT_S": str(365 * 24 * 3600),
        "SUBMITIT_LOCAL_WITH_SHELL": "1",
        "SUBMITIT_STDERR_TO_STDOUT": "1",
    }
    with run.batch_log.open("wb") as log:
        process = subprocess.Popen(
            ["/bin/bash", str(run.script)],
            cwd=project,
            env={**environment(), **controller, "HPCDDP_PICKLE_SHA256": digest},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    pickle.rename(run.submitit / f"{process.pid}_submitted.pkl")
    document = {"cluster": "local", "job_id": str(process.pid), "directory": str(project), "python": sys.executable}
    run.submission.write_text(json.dumps({**document, "time": 1795329472.78}))
    return process.wait(timeout=_TIMEOUT_S)


def resume(project: Path, run: Path) -> subprocess.CompletedProcess[str]:
    """Resume a run with this version, and wait for its end."""
    return subprocess.run(
        [sys.executable, "-m", "hpcddp", "submit", "--resume", str(run), "--follow", "--json"],
        cwd=project,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )


def test_a_training_that_was_submitted_before_the_upgrade_runs_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(MODEL)
    run = submitted_run(tmp_path, "digits", script_of("training"))
    assert run_to_its_end(tmp_path, run) == 0, run.batch_log.read_text()
    result = json.loads(run.result.read_text())
    assert (result["status"], result["steps"], result["world_size"], result["attempts"]) == ("finished", 69, 2, 1)
    assert result["final_loss"] == pytest.approx(FINAL_LOSS, rel=1e-9)


def test_a_command_that_was_submitted_before_the_upgrade_runs_to_its_end(tmp_path: Path) -> None:
    run = submitted_run(tmp_path, "words", script_of("command"))
    assert run_to_its_end(tmp_path, run) == 0, run.batch_log.read_text()
    assert json.loads(run.result.read_text())["status"] == "finished"
    assert sorted((run.path / "words").read_text().splitlines()) == ["0 a b", "1 a b"]


def test_a_run_that_was_stopped_before_the_upgrade_goes_on_after_its_last_step(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(MODEL)
    run = RunDirectory(tmp_path / "runs" / "digits" / "r1")
    shutil.copytree(GOLDEN / "stopped_run", run.path)
    for path in (run.path.parent, run.path, *run.path.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    run.script.write_text(script_of("training"))
    submission = {**json.loads(run.submission.read_text()), "directory": str(tmp_path), "python": sys.executable}
    run.submission.write_text(json.dumps(submission))
    done = resume(tmp_path, run.path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(run.result.read_text())
    assert (result["status"], result["steps"], result["attempts"]) == ("finished", 69, 2)
    assert result["final_loss"] == pytest.approx(FINAL_LOSS, rel=1e-9)
    assert [record["step"] for record in records(run)] == list(range(1, 70))


@pytest.mark.parametrize(("old", "new"), FORWARDED.items(), ids=FORWARDED)
def test_an_old_module_name_leads_to_the_file_of_today(old: str, new: str) -> None:
    assert import_module(old).__file__ == import_module(new).__file__


def test_a_module_that_version_0_1_0_did_not_name_in_a_job_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"hpcddp\.launch\.render"):
        import_module("hpcddp.launch.render")


@pytest.mark.parametrize("module", ["hpcddp.launch.attempt", "hpcddp.supervise"])
def test_begin_starts_an_attempt_under_its_old_and_its_new_name(module: str, tmp_path: Path) -> None:
    job = (GOLDEN / "stopped_run" / "job.yaml").read_text()
    words = ("begin", f"--run-root={tmp_path}", "--name=digits", "--run-id=r1")
    code, directory, errors = python("-m", module, *words, text=job, HPCDDP_LOCAL_JOB_ID="4194305")
    assert (code, directory) == (0, f"{tmp_path / 'digits' / 'r1' / 'attempts' / '0'}\n"), errors


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("hpcddp.launch.attempt", "hpcddp.supervise", ("begin",)),
        ("hpcddp.launch.attempt", "hpcddp.supervise", ("end",)),
        ("hpcddp.launch.attempt", "hpcddp.supervise", ("end", "--help")),
        ("hpcddp.launch.task", "hpcddp.task", ()),
    ],
)
def test_an_old_program_answers_like_the_program_of_today(old: str, new: str, words: tuple[str, ...]) -> None:
    assert python("-u", "-m", old, *words) == python("-u", "-m", new, *words)


@pytest.mark.parametrize("name", ["training", "command"])
def test_the_script_of_a_moved_run_of_version_0_1_0_acts_on_the_new_place(name: str, tmp_path: Path) -> None:
    job_name = {"training": "digits", "command": "words"}[name]
    script = script_of(name)
    place = RunDirectory(tmp_path / "a b" / job_name / "moved")
    moved = moved_script(script, ScriptRunDirectory(run_root="runs", name=job_name, run_id="r1"), place)
    assert f"hpcddp.launch.attempt begin --run-root=runs --name={job_name} --run-id=r1" in script
    assert f"hpcddp.supervise begin --run-root='{tmp_path / 'a b'}' --name={job_name} --run-id=moved" in moved
    assert "hpcddp.launch.attempt begin" not in moved


def test_a_moved_run_of_version_0_1_0_is_followed(tmp_path: Path) -> None:
    run = submitted_run(tmp_path, "words", script_of("command"))
    document = {"cluster": "local", "job_id": "4194305", "directory": str(tmp_path), "python": sys.executable}
    run.submission.write_text(json.dumps({**document, "time": 1795329472.78}))
    place = tmp_path / "elsewhere" / "renamed"
    place.parent.mkdir()
    run.path.rename(place)
    done = resume(tmp_path, place)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted((place / "words").read_text().splitlines()) == ["0 a b", "1 a b"]
    assert not run.path.exists()
