"""A program of the user's own reports metrics, and ``submit``, ``status`` and ``why`` show them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from hpcddp.run.directory import RunDirectory
from hpcddp.run.trackers import TrackerPosition, read_position
from tests.command_line import hpcddp

PROGRAM = """
import json, os, signal, sys
import hpcddp

# The first attempt is killed after step 20, in the middle of a line; the second one resumes after step 10.
again = os.environ["HPCDDP_ATTEMPT"] == "1"
for step in range(11 if again else 1, 31 if again else 21):
    hpcddp.log({"loss": 1 / step}, step=step)
    if step % 10 == 0:
        hpcddp.log({"val_f1": {10: 0.5, 20: 0.4 if again else 0.9, 30: 0.3}[step]}, step=step)
if os.environ["RANK"] == "0":
    with open(os.environ["HPCDDP_METRICS_FILE"], "a") as file:
        file.write(json.dumps({"step": step, "eval/perplexity": 9.5}) + "\\n" + "[" * 5_000 + '\\n{"step": 3')
    if not again:
        os.kill(os.getpid(), signal.SIGKILL)
"""
JOB = """
name: mine
command: [python, train.py]
resources: {tasks_per_node: 2}
"""


def called(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return hpcddp(directory, *words, environment={**os.environ, "COLUMNS": "200"})


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("", id="alone", marks=pytest.mark.long("test_commands_local.py sees that no tracker runs")),
        pytest.param("trackers: {use: [tensorboard]}\n", id="with a tracker"),
    ],
)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a run of two attempts."""
    directory = tmp_path_factory.mktemp("command")
    (directory / "train.py").write_text(PROGRAM)
    (directory / "job.yaml").write_text(JOB + request.param)
    words = ("--cluster", "local", "--follow")
    killed = called(directory, "submit", "job.yaml", *words)
    assert "was killed by SIGKILL" in killed.stderr
    assert "step 20  loss 0.0500  val_f1 0.9" in killed.stderr
    done = called(directory, "submit", "job.yaml", "--resume", str(run_of(directory).path), *words)
    assert done.returncode == 0, done.stderr
    assert "step 30  loss 0.0333  val_f1 0.3" in done.stderr
    return directory


def run_of(directory: Path) -> RunDirectory:
    (path,) = (directory / "runs" / "mine").iterdir()
    return RunDirectory(path)


def test_its_metrics_are_in_the_result_and_in_status_and_why(directory: Path) -> None:
    run = run_of(directory)
    metrics = {
        "val_f1": {"last": 0.3, "last_step": 30, "best": 0.5, "best_step": 10, "mode": "max"},
        "eval/perplexity": {"last": 9.5, "last_step": 30, "best": 9.5, "best_step": 20, "mode": "min"},
    }
    assert json.loads(run.result.read_text())["metrics"] == metrics
    (shown,) = json.loads(called(directory, "status", run.run_id, "--json").stdout)["runs"]
    assert (shown["step"], shown["loss"], shown["metrics"]) == (30, 1 / 30, metrics)
    lines = called(directory, "status", run.run_id).stdout.splitlines()
    assert "val_f1: best 0.5 after step 10, last 0.3 after step 30" in lines
    why = json.loads(called(directory, "why", run.run_id, "--json").stdout)
    assert "eval/perplexity: best 9.5 after step 20, last 9.5 after step 30" in why["facts"]
    assert len([fact for fact in why["facts"] if "damaged, and left out" in fact]) == 1


def test_trackers_run_only_if_the_job_names_them(directory: Path) -> None:
    run, named = run_of(directory), "tensorboard" in (directory / "job.yaml").read_text()
    assert (run.tensorboard.exists(), run.trackers.exists()) == (named, named)
    if named:
        from tests.train.shown import shown_by_tensorboard

        curves = shown_by_tensorboard(run.path)
        assert [step for step, _ in curves["train/loss"]] == list(range(1, 31))
        assert [(step, round(value, 6)) for step, value in curves["val/f1"]] == [(10, 0.5), (20, 0.4), (30, 0.3)]
        assert read_position(run.tracker("tensorboard")) == TrackerPosition(step=30, evaluated_step=30)
        log = run.attempt(0).rank_log(0).read_text()
        assert log.count("has damaged lines, which tensorboard leaves out") == 1
