"""What the rendered script does, with small programs in place of python and srun."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from hpcddp.jobfile.cluster import Cluster
from tests.messages import GoldenMessages
from tests.submission.script_runner import LAUNCHERS, MODULE, ScriptRunner, script_of
from tests.waiting import wait_for_text, wait_until

HOST = socket.gethostname()
ON_HOST = {f" on {HOST}": " on HOST"}


def test_srun_is_told_how_many_tasks_and_each_has_a_log(runner: ScriptRunner) -> None:
    script = script_of(runner, resources={"nodes": 3, "tasks_per_node": 2, "cpus_per_task": 4})
    attempt = runner.directory / "50%" / "attempts" / "0"

    assert runner.run(script, ATTEMPT=str(attempt)) == (0, "")

    words = runner.words("srun")
    assert words[: words.index("sh")] == [
        "--nodes=3",
        "--ntasks=6",
        "--ntasks-per-node=2",
        "--cpus-per-task=4",
        "--distribution=block",
        "--kill-on-bad-exit=1",
        # The cluster's WaitTime would end ranks that work longer than others.
        "--wait=0",
        "--unbuffered",
    ]
    assert (attempt / "rank-0.log").read_text() == "this is the task\n"
    assert (attempt / "rank-0.log").stat().st_mode & 0o777 == 0o600
    assert runner.words("task") == ["-P", "-u", "-m", "hpcddp.task"]
    assert f"HPCDDP_ATTEMPT_DIR={attempt}" in runner.words("environment")


def test_srun_starts_one_launcher_on_each_node(runner: ScriptRunner) -> None:
    resources = {"nodes": 3, "gpus_per_node": 2, "cpus_per_task": 4}
    script = script_of(runner, resources=resources, train=None, command=("torchrun", "train.py"))
    directives = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    for directive in ("--nodes=3", "--ntasks-per-node=1", "--gres=gpu:2", "--cpus-per-task=8"):
        assert directive in directives
    assert "srun --nodes=3 --ntasks=3 --ntasks-per-node=1 --cpus-per-task=8 " in script


def test_on_this_machine_submitits_controller_starts_the_tasks(runner: ScriptRunner) -> None:
    assert runner.run(script_of(runner, launcher="local")) == (0, "")
    assert runner.words("srun") == []
    assert runner.words("task") == ["-P", "-m", "submitit.local._local", f"{runner.record}/submitit"]


def test_on_this_machine_the_shells_process_id_is_the_job_id(runner: ScriptRunner) -> None:
    process = runner.start(script_of(runner, launcher="local"))
    runner.end_of(process)
    assert f"HPCDDP_LOCAL_JOB_ID={process.pid}" in runner.words("environment")


def test_a_script_without_a_run_id_leaves_the_id_to_the_job(runner: ScriptRunner) -> None:
    assert runner.run(script_of(runner, run_id=None)) == (0, "")
    assert runner.words("begin")[4:] == ["--run-root=runs", "--name=example"]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_code_of_the_tasks_goes_to_the_end_and_the_code_of_the_end_is_the_jobs(
    runner: ScriptRunner, launcher: Cluster
) -> None:
    code, errors = runner.run(script_of(runner, launcher=launcher), TASK_CODE="137", END_CODE="70")
    assert (code, errors) == (70, "")
    assert runner.end_options()[-2:] == ["--code", "137"]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_tasks_start_again_if_the_end_prints_the_next_attempt(runner: ScriptRunner, launcher: Cluster) -> None:
    assert runner.run(script_of(runner, launcher=launcher), RESTARTS="1", END_CODE="70") == (70, "")
    assert f"HPCDDP_ATTEMPT_DIR={runner.record}/attempts/1" in runner.words("environment")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_signal_during_the_end_starts_no_task_again(runner: ScriptRunner, launcher: Cluster) -> None:
    (runner.record / "hold-end").touch()
    process = runner.start(script_of(runner, launcher=launcher), RESTARTS="1")
    wait_until((runner.record / "end-status").exists, "the end")
    process.send_signal(signal.SIGTERM)
    (runner.record / "hold-end").unlink()
    assert runner.end_of(process) == 0
    assert f"HPCDDP_ATTEMPT_DIR={runner.record}/attempts/0" in runner.words("environment")
    cancelled = [] if launcher == "slurm" else ["--cancelled"]
    assert runner.end_options() == ["--code", "143", *cancelled]


def test_a_run_that_has_finished_is_left_alone(runner: ScriptRunner) -> None:
    assert runner.run(script_of(runner), ATTEMPT="") == (0, "")
    assert runner.words("srun") == []
    assert runner.words("end") == []


def test_a_run_directory_that_cannot_be_claimed_ends_the_job_with_that_code(runner: ScriptRunner) -> None:
    assert runner.run(script_of(runner), BEGIN_CODE="2") == (2, "")
    assert runner.words("srun") == []


@pytest.mark.parametrize(
    ("launcher", "signals"),
    [
        ("slurm", [signal.SIGUSR2, signal.SIGTERM, signal.SIGUSR2, signal.SIGTERM]),
        ("local", [signal.SIGUSR2]),
        ("here", [signal.SIGTERM, signal.SIGINT]),
    ],
)
def test_the_shell_survives_the_warning_and_the_end_of_its_time_and_still_gets_the_tasks_code(
    runner: ScriptRunner, launcher: Cluster, signals: list[signal.Signals]
) -> None:
    (runner.record / "hold").touch()
    process = runner.start(script_of(runner, launcher=launcher), TASK_CODE="75", END_CODE="75")
    wait_until((runner.record / "running").exists, "a file of the script")
    for number in signals:
        runner.signal(process, number)
    (runner.record / "hold").unlink()
    assert runner.end_of(process) == 75
    assert runner.end_options()[:2] == ["--code", "75"]


def scancel_in(runner: ScriptRunner) -> None:
    scancel = runner.directory / "bin" / "scancel"
    scancel.write_text('#!/bin/bash\necho "$@" >>"$RECORD/scancel"\n')
    scancel.chmod(0o700)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_in_an_allocation_ending_the_shell_signals_the_tasks_and_not_srun_and_then_kills_them(
    runner: ScriptRunner, number: signal.Signals
) -> None:
    scancel_in(runner)
    (runner.record / "hold").touch()
    process = runner.start(script_of(runner, launcher="here"), SLURM_JOB_ID="12", SLURM_STEP_ID="3")
    wait_until((runner.record / "running").exists, "a file of the script")
    runner.signal(process, number)
    wait_for_text(runner.record / "scancel", "--signal=TERM 12.3\n")
    runner.signal(process, number)
    # The script counts whole seconds.
    time.sleep(6.1)
    # The record is that of a TERM to srun, in whose place the task stands here.
    assert not (runner.record / "signals").exists()
    runner.signal(process, number)
    wait_until((runner.record / "signals").exists, "the end of srun")
    (runner.record / "hold").unlink()
    runner.end_of(process)
    assert (runner.record / "scancel").read_text() == "--signal=TERM 12.3\n"
    assert runner.end_options()[-3:] == ["--code", "0", "--cancelled"]


def test_in_an_allocation_srun_starts_the_tasks_of_a_local_job_and_the_watch_warns_them(runner: ScriptRunner) -> None:
    script = script_of(runner, launcher="here", resources={"nodes": 3, "tasks_per_node": 2})
    process = runner.start(script, SLURM_JOB_ID="12", SLURM_STEP_ID="3")
    runner.end_of(process)
    assert runner.words("srun")[:3] == ["--nodes=3", "--ntasks=6", "--ntasks-per-node=2"]
    assert (runner.record / "attempts" / "0" / "rank-0.log").read_text() == "this is the task\n"
    assert f"HPCDDP_LOCAL_JOB_ID={process.pid}" in runner.words("environment")
    wait_until(lambda: runner.words("watch"), "the watch")
    assert runner.words("watch")[-1] == "--warn"
    assert runner.end_options()[-2:] == ["--code", "0"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_on_this_machine_ending_the_shell_ends_the_tasks(runner: ScriptRunner, number: signal.Signals) -> None:
    (runner.record / "hold").touch()
    process = runner.start(script_of(runner, launcher="local"))
    wait_until((runner.record / "running").exists, "a file of the script")
    process.send_signal(number)
    wait_until((runner.record / "signals").exists, "a file of the script")
    (runner.record / "hold").unlink()
    runner.end_of(process)
    assert (runner.record / "signals").read_text() == "TERM\n"
    assert runner.end_options()[-3:] == ["--code", "0", "--cancelled"]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_shell_that_is_told_to_end_before_its_tasks_start_starts_none_and_still_does_its_end(
    runner: ScriptRunner, launcher: Cluster
) -> None:
    (runner.record / "hold-begin").touch()
    process = runner.start(script_of(runner, launcher=launcher), END_CODE="75")
    wait_until((runner.record / "directory").exists, "a file of the script")
    process.send_signal(signal.SIGTERM)
    (runner.record / "hold-begin").unlink()
    assert runner.end_of(process) == 75
    assert runner.words("task") == []
    assert runner.end_options()[:2] == ["--code", "143"]


def script_with_hooks(runner: ScriptRunner, launcher: Cluster) -> str:
    """A script with lines before and after the tasks, of a template that extends the default one."""
    template = runner.directory / "own.sh.j2"
    template.write_text(
        '{% extends "hpcddp/sbatch.sh.j2" %}\n'
        "{% block before_tasks %}\n"
        '  echo "before $HPCDDP_ATTEMPT_DIR" >>"$RECORD/hooks"\n'
        "  while [[ -e $RECORD/hold-hook ]]; do sleep 0.02; done\n"
        "{% endblock %}\n"
        "{% block after_tasks %}\n"
        '  echo "after $hpcddp_code" >>"$RECORD/hooks"\n'
        "  false\n"
        "{% endblock %}\n"
    )
    return script_of(runner, launcher=launcher, template=str(template))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_lines_of_a_template_run_before_and_after_the_tasks_of_each_attempt(
    runner: ScriptRunner, launcher: Cluster
) -> None:
    script = script_with_hooks(runner, launcher)
    assert runner.run(script, TASK_CODE="137", RESTARTS="1", END_CODE="70") == (70, "")
    attempts = runner.record / "attempts"
    assert (runner.record / "hooks").read_text().splitlines() == [
        f"before {attempts}/0",
        "after 137",
        f"before {attempts}/1",
        "after 137",
    ]
    assert runner.end_options()[:2] == ["--code", "137"]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_signal_during_the_lines_before_the_tasks_starts_no_task(runner: ScriptRunner, launcher: Cluster) -> None:
    (runner.record / "hold-hook").touch()
    process = runner.start(script_with_hooks(runner, launcher), END_CODE="75")
    wait_until((runner.record / "hooks").exists, "the lines before the tasks")
    process.send_signal(signal.SIGTERM)
    (runner.record / "hold-hook").unlink()
    assert runner.end_of(process) == 75
    assert runner.words("task") == []
    assert (runner.record / "hooks").read_text().splitlines()[-1] == "after 143"


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("phase", ["begin", "end"])
def test_the_claim_and_the_end_are_deaf_to_signals(runner: ScriptRunner, launcher: Cluster, phase: str) -> None:
    runner.run(script_of(runner, launcher=launcher))
    status = (runner.record / f"{phase}-status").read_text()
    ignored = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn")), 16)
    assert all(ignored & (1 << (number - 1)) for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT))


def test_a_task_ignores_the_warning_until_it_has_a_handler(runner: ScriptRunner) -> None:
    (runner.record / "hold").touch()
    process = runner.start(script_of(runner))
    wait_until((runner.record / "running").exists, "a file of the script")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    # The watch, which is another, ends at once.
    task = wait_until(lambda: len(found := children.read_text().split()) == 1 and found[0], "one child of the script")
    ignored = next(line for line in Path(f"/proc/{task}/status").read_text().splitlines() if line.startswith("SigIgn"))
    (runner.record / "hold").unlink()
    runner.end_of(process)
    assert int(ignored.split()[1], 16) & (1 << (signal.SIGUSR2 - 1))


def test_whatever_setup_lines_do_the_job_goes_on_from_the_directory_of_submission(runner: ScriptRunner) -> None:
    setup = ("set -eu -o pipefail", "cd /", "sleep 1000 &", "helper=$!", f"echo $helper > {runner.record}/helper")
    try:
        assert runner.run(script_of(runner, environment={"setup": setup}), TASK_CODE="1", END_CODE="71") == (71, "")
    finally:
        os.kill(int((runner.record / "helper").read_text()), signal.SIGKILL)
    assert (runner.record / "directory").read_text() == f"{runner.directory}\n"
    assert runner.end_options()[-2:] == ["--code", "1"]


def test_a_secret_that_is_not_set_is_named_before_anything_starts(runner: ScriptRunner, golden: GoldenMessages) -> None:
    script = script_of(runner, environment={"pass_env": ("SET_ONE", "UNSET_ONE")})
    code, errors = runner.run(script, SET_ONE="")
    assert code == 2
    assert golden.message(errors).startswith("hpcddp: environment.pass_env names UNSET_ONE, ")
    assert "; export it " in errors
    assert runner.words("begin") == []


def test_a_secret_reaches_the_tasks_and_stands_nowhere_in_the_script(runner: ScriptRunner) -> None:
    script = script_of(runner, environment={"pass_env": ("TOKEN",)})
    assert runner.run(script, TOKEN="s3cret") == (0, "")
    assert "TOKEN=s3cret" in runner.words("environment")
    assert "s3cret" not in script


def test_a_module_that_does_not_load_ends_the_job(runner: ScriptRunner, golden: GoldenMessages) -> None:
    script = script_of(runner, environment={"modules": ("cuda",)})
    code, errors = runner.run(script, MODULE_CODE="3")
    assert code == 2
    assert golden.message(errors, ON_HOST).startswith("hpcddp: environment.modules names cuda, ")
    assert f" on {HOST}; " in errors
    assert "(module avail " in errors
    assert runner.words("begin") == []


def test_a_missing_module_command_is_said_in_one_sentence(runner: ScriptRunner, golden: GoldenMessages) -> None:
    script = script_of(runner, environment={"modules": ("cuda",)})
    environment = runner.environment()
    del environment["MODULESHOME"]
    # The machine that runs this may have modules.
    code, errors = runner.run_with(script.replace("/etc/profile.d", str(runner.directory)), environment)
    assert code == 2
    message = golden.message(errors, ON_HOST)
    assert message.startswith("hpcddp: environment.modules needs the module command, ")
    assert f" on {HOST}; submit from a shell " in message
    assert "environment.setup" in message
    assert runner.words("begin") == []


def test_where_the_shell_brings_no_module_command_that_of_the_machine_is_made(runner: ScriptRunner) -> None:
    environment = runner.environment()
    (runner.directory / "lmod.sh").write_text(MODULE)
    del environment["MODULESHOME"]
    script = script_of(runner, environment={"modules": ("cuda", "nccl")})
    assert runner.run_with(script.replace("/etc/profile.d", str(runner.directory)), environment) == (0, "")
    assert runner.words("module") == ["load", "cuda", "load", "nccl"]


def test_an_interpreter_without_hpcddp_is_named_when_nothing_has_started(
    runner: ScriptRunner, golden: GoldenMessages
) -> None:
    runner.python.write_text(f'#!/bin/bash\nexec {sys.executable} -S -E "$@"\n')
    code, errors = runner.run(script_of(runner))
    assert code == 1
    message = golden.message(errors.splitlines()[-1], ON_HOST)
    assert message.startswith(f"hpcddp: {runner.python} cannot run hpcddp on {HOST}; ")
    assert "(docs/install.md)" in message
    assert runner.words("srun") == []
