"""What the rendered script does with containers; small programs stand in for apptainer and pyxis."""

from __future__ import annotations

import signal
import socket
from pathlib import Path
from typing import Literal

import pytest

from tests.launch.environments import APPTAINER, PYXIS, apptainer_job, install, put, use_controller, variables
from tests.launch.stage import PYTHON, Stage
from tests.launch.test_render_script import LAUNCHERS, script_of, wait_for

HOST = socket.gethostname()


def test_each_task_is_a_command_in_apptainer_that_sees_the_run(stage: Stage) -> None:
    install(stage, apptainer=APPTAINER)
    resources = {"gpus_per_node": 2, "cpus_per_task": 1}
    container = apptainer_job(mounts=("/a b:/c:ro",), python="python3")
    job = script_of(stage, resources=resources, environment=container | {"env": {"HF_HOME": "it's"}})
    assert stage.run(job) == (0, "")
    words = stage.words("apptainer")
    here = str(stage.directory)
    assert words[: words.index("sh")] == [
        "exec", "--nv", "--pwd", here, "--bind", here, "--bind", str(stage.record), "--bind", "/a b:/c:ro", "i.sif",
    ]  # fmt: skip
    assert words[-5:] == ["python3", "-P", "-u", "-m", "hpcddp.launch.task"]
    assert stage.words("task") == ["-P", "-u", "-m", "hpcddp.launch.task"]
    assert variables(stage)["APPTAINERENV_HF_HOME"] == "it's"
    assert (stage.record / "attempts" / "0" / "rank-0.log").read_text().endswith("this is the task\n")


def test_a_cpu_job_asks_apptainer_for_no_gpu_and_a_working_directory_may_be_inside(stage: Stage) -> None:
    install(stage, apptainer=APPTAINER)
    assert stage.run(script_of(stage, environment=apptainer_job(workdir="/work space"))) == (0, "")
    assert stage.words("apptainer")[:3] == ["exec", "--pwd", "/work space"]


def test_python_in_a_container_is_the_interpreter_that_was_chosen(stage: Stage) -> None:
    install(stage, apptainer=APPTAINER)
    put(stage.directory / "other" / "bin" / "python3", PYTHON)
    python = str(stage.directory / "other" / "bin" / "python3")
    assert stage.run(script_of(stage, environment=apptainer_job(python=python))) == (0, "")
    assert stage.words("program") == [python]
    assert variables(stage)["PATH"].split(":")[0] == str(stage.directory / "other" / "bin")


def test_a_task_in_a_container_ignores_the_warning_until_it_has_a_handler(stage: Stage) -> None:
    install(stage, apptainer=APPTAINER)
    (stage.record / "hold").touch()
    process = stage.start(script_of(stage, environment=apptainer_job()))
    wait_for(stage.record / "running")
    (task,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ignored = next(line for line in Path(f"/proc/{task}/status").read_text().splitlines() if line.startswith("SigIgn"))
    (stage.record / "hold").unlink()
    stage.end_of(process)
    assert int(ignored.split()[1], 16) & (1 << (signal.SIGUSR2 - 1))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_container_without_hpcddp_is_said_in_one_sentence(stage: Stage, launcher: Literal["slurm", "local"]) -> None:
    install(stage, apptainer=APPTAINER)
    put(stage.directory / "image" / "python3", "#!/bin/bash\necho \"No module named 'hpcddp'\" >&2; exit 1\n")
    if launcher == "local":
        use_controller(stage)
    assert stage.run(script_of(stage, launcher=launcher, environment=apptainer_job())) == (0, "")
    assert stage.words("end")[5] == "2"
    assert (stage.record / "attempts" / "0" / "rank-0.log").read_text() == (
        "No module named 'hpcddp'\nhpcddp: this task cannot start: python3 in the container cannot run hpcddp; install "
        "hpcddp in the image, or write another interpreter of it as environment.container.python\n"
    )


def test_on_this_machine_the_words_reach_apptainer_unchanged(stage: Stage) -> None:
    install(stage, apptainer=APPTAINER)
    use_controller(stage)
    hostile = """/it's "$HOME" \\ *"""
    script = script_of(stage, launcher="local", environment=apptainer_job(mounts=(hostile,), workdir=hostile))
    assert stage.run(script) == (0, "")
    assert stage.words("apptainer")[:3] == ["exec", "--pwd", hostile]
    assert f"{hostile}:{hostile}" in stage.words("apptainer")
    assert stage.words("task") == ["-P", "-u", "-m", "hpcddp.launch.task"]


def test_srun_starts_a_container_of_pyxis_that_sees_the_run(stage: Stage) -> None:
    install(stage, srun=PYXIS)
    container = {"image": "nvcr.io#nvidia/pytorch:24.05-py3", "mounts": ("/a:/b:ro", "/c")}
    script = script_of(
        stage,
        environment={"container": container, "env": {"HF_HOME": "x"}, "pass_env": ("TOKEN",)},
        train={"model": "resnet18", "dataset": "imagefolder", "data_dir": "/data/train"},
    )
    assert stage.run(script, TOKEN="s") == (0, "")
    words = stage.words("srun")
    here, run = stage.directory, stage.record
    assert words[7 : words.index("sh")] == [
        "--container-image=nvcr.io#nvidia/pytorch:24.05-py3",
        f"--container-mounts={here}:{here},{run}:{run},/a:/b:ro,/c:/c,/data/train:/data/train",
        f"--container-workdir={here}",
        "--container-env=HF_HOME,TOKEN",
    ]
    assert stage.words("task") == ["-P", "-u", "-m", "hpcddp.launch.task"]
    assert "s" not in words


def test_a_variable_that_a_sweep_varies_wins_over_the_images_too(stage: Stage) -> None:
    install(stage, srun=PYXIS)
    environment = {"container": {"image": "x"}, "env": {"A": "b"}}
    script = script_of(stage, environment=environment, sweep={"environment.env.LR": ["1e-1", "1e-2"]})
    assert stage.run(script, SLURM_ARRAY_TASK_ID="1") == (0, "")
    assert "--container-env=A,LR" in stage.words("srun")
    assert variables(stage)["LR"] == "1e-2"


def test_a_directory_that_a_container_cannot_mount_is_named(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "a,b")
    stage.directory.mkdir()
    stage.set_up()
    install(stage, apptainer=APPTAINER)
    assert stage.run(script_of(stage, environment=apptainer_job())) == (
        2,
        (
            f"hpcddp: the directory of submission is {stage.directory}, which apptainer cannot mount on {HOST}; submit "
            "from a directory without a comma, colon or ^ in its path\n"
        ),
    )
