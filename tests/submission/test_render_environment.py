"""What the rendered script does with conda, virtual environments and uv, and what it says when something is missing."""

from __future__ import annotations

import signal
import socket
from typing import Any

import pytest

from hpcddp.jobfile.cluster import Cluster
from tests.messages import GoldenMessages
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
ON_HOST = {f" on {HOST}": " on HOST"}


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
    ("environment", "field", "advice"),
    [
        ({"venv": "it's gone"}, "environment.venv is it's gone", f"no it's gone/bin/python on {HOST}; make it "),
        ({"uv": "gone"}, "environment.uv is gone", f"no gone/.venv/bin/python on {HOST}; run uv sync "),
        ({"conda": "./gone"}, "environment.conda is ./gone", "(conda env list lists the environments)"),
        (apptainer_job(image="gone.sif"), "environment.container.image is gone.sif", "correct the path"),
        ({"container": {"image": "x"}}, "environment.container.runtime is pyxis", "; write runtime: apptainer, "),
    ],
    ids=["venv", "uv", "conda", "image", "pyxis"],
)
def test_what_is_missing_ends_the_script_with_one_sentence_and_starts_nothing(
    runner: ScriptRunner, golden: GoldenMessages, environment: dict[str, Any], field: str, advice: str
) -> None:
    install_programs(runner, conda=CONDA, apptainer=APPTAINER)
    code, errors = runner.run(script_of(runner, environment=environment))
    assert code == 2
    message = golden.message(errors.splitlines()[-1], ON_HOST)
    assert message.startswith(f"hpcddp: {field}, ")
    assert f" on {HOST}; " in message
    assert advice in message
    assert [line for line in errors.splitlines() if line.startswith("hpcddp")] == [message]
    assert runner.words("begin") == []


@pytest.mark.parametrize(
    ("environment", "missing"),
    [
        ({"conda": "x"}, "environment.conda needs conda"),
        (apptainer_job(), "environment.container.runtime is apptainer"),
        (apptainer_job(runtime="singularity"), "environment.container.runtime is singularity"),
    ],
    ids=["conda", "apptainer", "singularity"],
)
def test_a_program_that_is_missing_is_named(
    runner: ScriptRunner, golden: GoldenMessages, environment: dict[str, Any], missing: str
) -> None:
    code, errors = runner.run(script_of(runner, environment=environment))
    assert code == 2
    assert golden.message(errors, ON_HOST).startswith(f"hpcddp: {missing}, which was not found on {HOST}; ")
    assert "its module in environment.modules" in errors


def test_an_activation_that_exits_is_no_job_that_has_trained(runner: ScriptRunner, golden: GoldenMessages) -> None:
    fake_virtual_environment(runner, "venv")
    write_program(runner.directory / "venv" / "bin" / "activate", "exit 0\n")
    code, errors = runner.run(script_of(runner, environment={"venv": "venv"}))
    assert code == 70
    assert " environment.setup ended the script with exit code 0; " in golden.message(errors)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_signal_during_the_activation_starts_no_task(runner: ScriptRunner, launcher: Cluster) -> None:
    fake_virtual_environment(runner, "venv")
    with (runner.directory / "venv" / "bin" / "activate").open("a") as activate:
        activate.write('touch "$RECORD/activating"; while [[ -e $RECORD/hold ]]; do sleep 0.02; done\n')
    (runner.record / "hold").touch()
    process = runner.start(script_of(runner, launcher=launcher, environment={"venv": "venv"}), END_CODE="75")
    wait_until((runner.record / "activating").exists, "a file of the script")
    process.send_signal(signal.SIGTERM)
    (runner.record / "hold").unlink()
    assert runner.end_of(process) == 75
    assert runner.words("task") == []
    assert runner.end_options()[:2] == ["--code", "143"]
