"""What the rendered script does with containers; small programs stand in for apptainer and pyxis."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest

from hpcddp import vendors
from hpcddp.jobfile.cluster import Cluster
from tests.messages import GoldenMessages
from tests.submission.fake_environments import (
    APPTAINER,
    PYXIS,
    apptainer_job,
    install_controller,
    install_mounts,
    install_programs,
    variables,
    write_program,
)
from tests.submission.script_runner import LAUNCHERS, PYTHON, ScriptRunner, script_of
from tests.waiting import wait_until

HOST = socket.gethostname()
ON_HOST = {f" on {HOST}": " on HOST"}


def test_each_task_is_a_command_in_apptainer_that_sees_the_run(runner: ScriptRunner) -> None:
    install_programs(runner, apptainer=APPTAINER)
    resources = {"gpus_per_node": 2, "cpus_per_task": 1}
    container = apptainer_job(mounts=("/a b:/c:ro",), python="python3")
    job = script_of(runner, resources=resources, environment=container | {"env": {"HF_HOME": "it's"}})
    assert runner.run(job) == (0, "")
    words = runner.words("apptainer")
    here = str(runner.directory)
    assert words[: words.index("sh")] == [
        "exec", "--nv", "--no-eval", "--pwd", here, "--bind", here, "--bind", str(runner.record), "--bind",
        "/a b:/c:ro", "i.sif",
    ]  # fmt: skip
    assert words[-5:] == ["python3", "-P", "-u", "-m", "hpcddp.task"]
    assert runner.words("task") == ["-P", "-u", "-m", "hpcddp.task"]
    assert variables(runner)["APPTAINERENV_HF_HOME"] == "it's"
    assert (runner.record / "attempts" / "0" / "rank-0.log").read_text().endswith("this is the task\n")


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(
    ("files", "option"),
    [(["kfd"], "--rocm"), (["nvidia1"], "--nv"), (["kfd", "nvidia0"], "--nv"), (["dxg"], "--nv"), (["zero"], "--nv")],
    ids=["amd", "nvidia", "both", "windows", "unknown"],
)
def test_the_device_files_of_the_node_choose_the_vendor_of_a_container(
    runner: ScriptRunner, monkeypatch: pytest.MonkeyPatch, files: list[str], option: str, launcher: Cluster
) -> None:
    install_programs(runner, singularity=APPTAINER.replace("APPTAINER", "SINGULARITY"))
    install_controller(runner)
    devices = runner.directory / "dev"
    devices.mkdir()
    for name in files:
        (devices / name).touch()
    monkeypatch.setattr(vendors, "ROOT", runner.directory)
    environment = apptainer_job(runtime="singularity") | {"env": {"HF_HOME": "/hub"}}
    script = script_of(runner, launcher=launcher, resources={"gpus_per_node": 1}, environment=environment)
    assert runner.run(script) == (0, "")
    assert runner.words("singularity")[:3] == ["exec", option, "--no-eval"]
    assert variables(runner)["HF_HOME"] == "/hub"


def test_no_shell_evaluates_a_value_for_a_container(runner: ScriptRunner) -> None:
    install_programs(runner, apptainer=APPTAINER)
    values = {"NOTE": f"`touch {runner.directory}/evaluated` $HOME", "TOKEN": "$(false)"}
    environment = apptainer_job() | {"env": {"NOTE": values["NOTE"]}, "pass_env": ("TOKEN",)}
    assert runner.run(script_of(runner, environment=environment), TOKEN=values["TOKEN"]) == (0, "")
    assert {name: variables(runner)[name] for name in values} == values
    assert not (runner.directory / "evaluated").exists()


def test_a_cpu_job_asks_apptainer_for_no_gpu_and_a_working_directory_may_be_inside(runner: ScriptRunner) -> None:
    install_programs(runner, apptainer=APPTAINER)
    assert runner.run(script_of(runner, environment=apptainer_job(workdir="/work space"))) == (0, "")
    assert runner.words("apptainer")[:4] == ["exec", "--no-eval", "--pwd", "/work space"]


def test_python_in_a_container_is_the_interpreter_that_was_chosen(runner: ScriptRunner) -> None:
    install_programs(runner, apptainer=APPTAINER)
    write_program(runner.directory / "other" / "bin" / "python3", PYTHON)
    python = str(runner.directory / "other" / "bin" / "python3")
    assert runner.run(script_of(runner, environment=apptainer_job(python=python))) == (0, "")
    assert runner.words("program") == [python]
    assert variables(runner)["PATH"].split(":")[0] == str(runner.directory / "other" / "bin")


def test_a_task_in_a_container_ignores_the_warning_until_it_has_a_handler(runner: ScriptRunner) -> None:
    install_programs(runner, apptainer=APPTAINER)
    (runner.record / "hold").touch()
    process = runner.start(script_of(runner, environment=apptainer_job()))
    wait_until((runner.record / "running").exists, "a file of the script")
    (task,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ignored = next(line for line in Path(f"/proc/{task}/status").read_text().splitlines() if line.startswith("SigIgn"))
    (runner.record / "hold").unlink()
    runner.end_of(process)
    assert int(ignored.split()[1], 16) & (1 << (signal.SIGUSR2 - 1))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_container_without_hpcddp_is_said_in_one_sentence(
    runner: ScriptRunner, golden: GoldenMessages, launcher: Cluster
) -> None:
    install_programs(runner, apptainer=APPTAINER)
    write_program(
        runner.directory / "image" / "python3", "#!/bin/bash\necho \"No module named 'hpcddp'\" >&2; exit 1\n"
    )
    if launcher == "local":
        install_controller(runner)
    assert runner.run(script_of(runner, launcher=launcher, environment=apptainer_job())) == (0, "")
    assert runner.end_options()[1] == "2"
    message = golden.message((runner.record / "attempts" / "0" / "rank-0.log").read_text())
    assert message.startswith("No module named 'hpcddp'\nhpcddp: ")
    assert "python3 in the container" in message
    assert "; install hpcddp in the image, " in message
    assert message.endswith(" environment.container.python\n")


def test_on_this_machine_the_words_reach_apptainer_unchanged(runner: ScriptRunner) -> None:
    install_programs(runner, apptainer=APPTAINER)
    install_controller(runner)
    hostile = """/it's "$HOME" \\ *"""
    script = script_of(runner, launcher="local", environment=apptainer_job(mounts=(hostile,), workdir=hostile))
    assert runner.run(script) == (0, "")
    assert runner.words("apptainer")[:4] == ["exec", "--no-eval", "--pwd", hostile]
    assert f"{hostile}:{hostile}" in runner.words("apptainer")
    assert runner.words("task") == ["-P", "-u", "-m", "hpcddp.task"]


def test_srun_starts_a_container_of_pyxis_that_sees_the_run(runner: ScriptRunner) -> None:
    install_programs(runner, srun=PYXIS)
    container = {"image": "nvcr.io#nvidia/pytorch:24.05-py3", "mounts": ("/a:/b:ro", "/c")}
    script = script_of(
        runner,
        environment={"container": container, "env": {"HF_HOME": "x"}, "pass_env": ("TOKEN",)},
        train={"model": "resnet18", "dataset": "imagefolder", "data_dir": "/data/train"},
    )
    assert runner.run(script, TOKEN="s") == (0, "")
    words = runner.words("srun")
    here, run = runner.directory, runner.record
    assert words[8 : words.index("sh")] == [
        "--container-image=nvcr.io#nvidia/pytorch:24.05-py3",
        f"--container-mounts={here}:{here},{run}:{run},/a:/b:ro,/c:/c,/data/train:/data/train",
        f"--container-workdir={here}",
        "--container-env=HF_HOME,TOKEN",
    ]
    assert runner.words("task") == ["-P", "-u", "-m", "hpcddp.task"]
    assert "s" not in words


def test_a_variable_that_a_sweep_varies_wins_over_the_images_too(runner: ScriptRunner) -> None:
    install_programs(runner, srun=PYXIS)
    environment = {"container": {"image": "x"}, "env": {"A": "b"}}
    script = script_of(runner, environment=environment, sweep={"environment.env.LR": ["1e-1", "1e-2"]})
    assert runner.run(script, SLURM_ARRAY_TASK_ID="1") == (0, "")
    assert "--container-env=A,LR" in runner.words("srun")
    assert variables(runner)["LR"] == "1e-2"


def test_a_directory_that_a_container_cannot_mount_is_named(tmp_path: Path, golden: GoldenMessages) -> None:
    runner = ScriptRunner(tmp_path / "a,b")
    runner.directory.mkdir()
    runner.set_up()
    install_programs(runner, apptainer=APPTAINER)
    code, errors = runner.run(script_of(runner, environment=apptainer_job()))
    assert code == 2
    assert f" {runner.directory}, which apptainer cannot mount on {HOST}; " in golden.message(errors, ON_HOST)
    assert "a comma, colon or ^" in errors


def test_a_container_sees_the_copy_of_the_code_and_the_project(runner: ScriptRunner) -> None:
    install_programs(runner, apptainer=APPTAINER)
    install_mounts(runner, "/the project", "/sweep/code/0")
    assert runner.run(script_of(runner, environment=apptainer_job() | {"code": "snapshot"})) == (0, "")
    assert {"--bind=/the project", "--bind=/sweep/code/0"} <= set(runner.words("apptainer"))
    assert runner.words("mounts")[-1] == f"--run={runner.record}"
    install_programs(runner, srun=PYXIS)
    container = {"image": "nvcr.io#nvidia/pytorch:24.05-py3"}
    assert runner.run(script_of(runner, environment={"container": container, "code": "snapshot"})) == (0, "")
    (mounts,) = (word for word in runner.words("srun") if word.startswith("--container-mounts="))
    assert mounts.endswith(",/the project:/the project,/sweep/code/0:/sweep/code/0")
