"""What the rendered script does with conda, virtual environments and uv, and what it says when something is missing."""

from __future__ import annotations

import signal
import socket
from typing import Any

import pytest

from hpcddp.jobfile.cluster import Cluster
from tests.submission.fake_environments import (
    APPTAINER,
    CONDA,
    apptainer_job,
    fake_virtual_environment,
    install_programs,
    variables,
    write_program,
)
from tests.submission.script_runner import LAUNCHERS, ScriptRunner, script_of
from tests.waiting import wait_until

HOST = socket.gethostname()


@pytest.mark.parametrize(("field", "name"), [("venv", "my venv"), ("uv", "my project/.venv"), ("conda", "envs/train")])
def test_an_environment_is_activated_and_runs_the_script_and_the_tasks(
    runner: ScriptRunner, field: str, name: str
) -> None:
    venv = fake_virtual_environment(runner, name)
    install_programs(runner, conda=CONDA)
    value = str(venv.parent if field == "uv" else venv)
    assert runner.run(script_of(runner, environment={field: value})) == (0, "")
    assert runner.words("program") == [str(venv / "bin" / "python")]
    assert runner.words("task") == ["-P", "-u", "-m", "hpcddp.task"]
    assert runner.words("begin")
    # So that `python train.py` finds it too.
    assert variables(runner)["PATH"].split(":")[0] == str(venv / "bin")


def test_the_tasks_of_a_uv_project_never_synchronise_it(runner: ScriptRunner) -> None:
    fake_virtual_environment(runner, "elsewhere")
    there = str(runner.directory / "elsewhere")
    script = script_of(runner, environment={"uv": "project"})
    assert runner.run(script, UV_PROJECT_ENVIRONMENT=there) == (0, "")
    assert variables(runner)["VIRTUAL_ENV"] == there
    assert variables(runner)["UV_NO_SYNC"] == "1"


def test_modules_come_before_the_environment_and_setup_lines_behind_it(runner: ScriptRunner) -> None:
    fake_virtual_environment(runner, "venv")
    order = "module() { echo module >> order; }\n"
    (runner.directory / "init" / "bash").write_text(order)
    with (runner.directory / "venv" / "bin" / "activate").open("a") as activate:
        activate.write("echo venv >> order\n")
    setup = ('echo "setup $VIRTUAL_ENV" >> order', "set -eux -o pipefail")
    script = script_of(runner, environment={"modules": ("x",), "venv": "venv", "setup": setup, "env": {"A": "b"}})
    assert runner.run(script)[0] == 0
    seen = (runner.directory / "order").read_text().splitlines()
    assert seen == ["module", "venv", f"setup {runner.directory}/venv"]


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        (
            {"venv": "it's gone"},
            (
                f"environment.venv is it's gone, and there is no it's gone/bin/python on {HOST}; make it on a file "
                "system that every node sees, or correct the path"
            ),
        ),
        (
            {"uv": "gone"},
            (
                f"environment.uv is gone, and there is no gone/.venv/bin/python on {HOST}; run uv sync in the project, "
                "on a file system that every node sees, or correct the path"
            ),
        ),
        (
            {"conda": "./gone"},
            (
                f"environment.conda is ./gone, which conda cannot activate on {HOST}; create it, or correct the name "
                "(conda env list lists the environments)"
            ),
        ),
        (
            apptainer_job(image="gone.sif"),
            (
                f"environment.container.image is gone.sif, which was not found on {HOST}; put it on a file system that "
                "every node sees, or correct the path"
            ),
        ),
        (
            {"container": {"image": "x"}},
            (
                f"environment.container.runtime is pyxis, which srun does not have on {HOST}; write runtime: "
                "apptainer, or select a partition where pyxis is installed"
            ),
        ),
    ],
)
def test_what_is_missing_ends_the_script_with_one_sentence_and_starts_nothing(
    runner: ScriptRunner, environment: dict[str, Any], sentence: str
) -> None:
    install_programs(runner, conda=CONDA, apptainer=APPTAINER)
    code, errors = runner.run(script_of(runner, environment=environment))
    assert (code, errors.splitlines()[-1]) == (2, f"hpcddp: {sentence}")
    assert [line for line in errors.splitlines() if line.startswith("hpcddp")] == [f"hpcddp: {sentence}"]
    assert runner.words("begin") == []


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        (
            {"conda": "x"},
            (
                f"environment.conda needs conda, which was not found on {HOST}; load its module in "
                "environment.modules, or submit from a shell in which conda works"
            ),
        ),
        (
            apptainer_job(),
            (
                f"environment.container.runtime is apptainer, which was not found on {HOST}; load its module in "
                "environment.modules"
            ),
        ),
    ],
)
def test_a_program_that_is_missing_is_named(runner: ScriptRunner, environment: dict[str, Any], sentence: str) -> None:
    assert runner.run(script_of(runner, environment=environment)) == (2, f"hpcddp: {sentence}\n")


def test_an_activation_that_exits_is_no_job_that_has_trained(runner: ScriptRunner) -> None:
    fake_virtual_environment(runner, "venv")
    write_program(runner.directory / "venv" / "bin" / "activate", "exit 0\n")
    sentence = (
        "hpcddp: a module, an activation or environment.setup ended the script with exit code 0; no task was started\n"
    )
    assert runner.run(script_of(runner, environment={"venv": "venv"})) == (70, sentence)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_signal_during_the_activation_starts_no_task(runner: ScriptRunner, launcher: Cluster) -> None:
    fake_virtual_environment(runner, "venv")
    with (runner.directory / "venv" / "bin" / "activate").open("a") as activate:
        activate.write('touch "$RECORD/activating"; while [[ -e $RECORD/hold ]]; do sleep 0.02; done\n')
    (runner.record / "hold").touch()
    process = runner.start(script_of(runner, launcher=launcher, environment={"venv": "venv"}), END_CODE="75")
    wait_until((runner.record / "activating").exists, "a file of the script", 30)
    process.send_signal(signal.SIGTERM)
    (runner.record / "hold").unlink()
    assert runner.end_of(process) == 75
    assert runner.words("task") == []
    assert runner.words("end")[4:6] == ["--code", "143"]
