"""What the rendered script does with conda, virtual environments and containers; small programs stand in for them."""

from __future__ import annotations

import signal
import socket
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.launch.stage import PYTHON, Stage
from tests.launch.test_render_script import LAUNCHERS, script_of, wait_for

HOST = socket.gethostname()
# The hook of the real conda defines a function of this name; its activate fails for an environment that is not there.
CONDA = r"""#!/bin/bash
[[ $* == "shell.bash hook" ]] || exit 9
cat <<'HOOK'
conda() {
  [[ $1 == activate ]] || return 9
  [[ -d $2 ]] || { echo "EnvironmentLocationNotFound: $2" >&2; return 1; }
  export CONDA_PREFIX=$2 PATH=$2/bin:$PATH
}
HOOK
"""
ACTIVATE = 'export VIRTUAL_ENV={}\nexport PATH="$VIRTUAL_ENV/bin:$PATH"\n'
# Takes apptainer's options off, and finds the image's interpreter on a PATH of its own.
APPTAINER = r"""#!/bin/bash
printf '%s\0' "$@" > "$RECORD/apptainer"
grep SigIgn /proc/self/status > "$RECORD/outside"
while [[ $1 != *.sif ]]; do shift; done
shift
PATH=$RECORD/../image:$PATH exec env --default-signal=USR2 "$@"
"""
PYXIS = r"""#!/bin/bash
if [[ $1 == --help ]]; then echo "      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH"; exit 0; fi
printf '%s\0' "$@" > "$RECORD/srun"
while [[ $1 == --* ]]; do shift; done
PATH=$RECORD/../image:$PATH SLURM_PROCID=0 exec "$@"
"""


def put(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o700)
    return path


def virtual(stage: Stage, name: str) -> Path:
    """Make what a virtual environment consists of, with the stage's interpreter in it."""
    venv = stage.directory / name
    put(venv / "bin" / "python", PYTHON)
    put(venv / "bin" / "activate", ACTIVATE.format(f"'{venv}'"))
    return venv


def variables(stage: Stage) -> dict[str, str]:
    return dict(word.partition("=")[::2] for word in stage.words("environment"))


def apptainer_job(**container: Any) -> dict[str, Any]:
    return {"container": {"image": "i.sif", "runtime": "apptainer", **container}}


def install(stage: Stage, **programs: str) -> None:
    for name, text in programs.items():
        put(stage.directory / "bin" / name, text)
    put(stage.directory / "image" / "python3", PYTHON)
    (stage.directory / "i.sif").touch()


@pytest.mark.parametrize(("field", "name"), [("venv", "my venv"), ("uv", "my project/.venv"), ("conda", "envs/train")])
def test_an_environment_is_activated_and_runs_the_script_and_the_tasks(stage: Stage, field: str, name: str) -> None:
    venv = virtual(stage, name)
    install(stage, conda=CONDA)
    value = str(venv.parent if field == "uv" else venv)
    assert stage.run(script_of(stage, environment={field: value})) == (0, "")
    assert stage.words("program") == [str(venv / "bin" / "python")]
    assert stage.words("task") == ["-P", "-u", "-m", "hpcddp.launch.task"]
    assert stage.words("begin")
    # So that `python train.py` finds it too.
    assert variables(stage)["PATH"].split(":")[0] == str(venv / "bin")


def test_the_tasks_of_a_uv_project_never_synchronise_it(stage: Stage) -> None:
    virtual(stage, "elsewhere")
    there = str(stage.directory / "elsewhere")
    script = script_of(stage, environment={"uv": "project"})
    assert stage.run(script, UV_PROJECT_ENVIRONMENT=there) == (0, "")
    assert variables(stage)["VIRTUAL_ENV"] == there
    assert variables(stage)["UV_NO_SYNC"] == "1"


def test_modules_come_before_the_environment_and_setup_lines_behind_it(stage: Stage) -> None:
    virtual(stage, "venv")
    order = "module() { echo module >> order; }\n"
    (stage.directory / "init" / "bash").write_text(order)
    with (stage.directory / "venv" / "bin" / "activate").open("a") as activate:
        activate.write("echo venv >> order\n")
    setup = ('echo "setup $VIRTUAL_ENV" >> order', "set -eux -o pipefail")
    script = script_of(stage, environment={"modules": ("x",), "venv": "venv", "setup": setup, "env": {"A": "b"}})
    assert stage.run(script)[0] == 0
    seen = (stage.directory / "order").read_text().splitlines()
    assert seen == ["module", "venv", f"setup {stage.directory}/venv"]


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        (
            {"venv": "it's gone"},
            (
                f"environment.venv is it's gone, and there is no it's gone/bin/python on {HOST}; make it on a file system "
                "that every node sees, or correct the path"
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
                "(conda env list shows all)"
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
                f"environment.container.runtime is pyxis, which srun does not have on {HOST}; write runtime: apptainer, or "
                "ask for pyxis where the cluster has it"
            ),
        ),
    ],
)
def test_what_is_missing_ends_the_script_with_one_sentence_and_starts_nothing(
    stage: Stage, environment: dict[str, Any], sentence: str
) -> None:
    install(stage, conda=CONDA, apptainer=APPTAINER)
    code, errors = stage.run(script_of(stage, environment=environment))
    assert (code, errors.splitlines()[-1]) == (2, f"hpcddp: {sentence}")
    assert [line for line in errors.splitlines() if line.startswith("hpcddp")] == [f"hpcddp: {sentence}"]
    assert stage.words("begin") == []


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        (
            {"conda": "x"},
            (
                f"environment.conda needs conda, which was not found on {HOST}; load its module in environment.modules, or "
                "submit from a shell in which conda works"
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
def test_a_program_that_is_missing_is_named(stage: Stage, environment: dict[str, Any], sentence: str) -> None:
    assert stage.run(script_of(stage, environment=environment)) == (2, f"hpcddp: {sentence}\n")


def test_an_activation_that_exits_is_no_job_that_has_trained(stage: Stage) -> None:
    virtual(stage, "venv")
    put(stage.directory / "venv" / "bin" / "activate", "exit 0\n")
    sentence = (
        "hpcddp: a module, an activation or environment.setup ended the script with exit code 0; no task was started\n"
    )
    assert stage.run(script_of(stage, environment={"venv": "venv"})) == (70, sentence)


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
        put(
            stage.python,
            PYTHON.replace("  *) printf", '  *" submitit.local._local "*) ' + CONTROLLER + ";;\n  *) printf"),
        )
    assert stage.run(script_of(stage, launcher=launcher, environment=apptainer_job())) == (0, "")
    assert stage.words("end")[5] == "2"
    assert (stage.record / "attempts" / "0" / "rank-0.log").read_text() == (
        "No module named 'hpcddp'\nhpcddp: this task cannot start: python3 in the container cannot run hpcddp; install "
        "hpcddp in the image, or write another interpreter of it as environment.container.python\n"
    )


# What submitit's controller makes of its variable: shlex.split, then a process without a shell.
CONTROLLER = r"""exec /usr/bin/env python3 -c 'import os, shlex
words = shlex.split(os.environ["SUBMITIT_LOCAL_COMMAND"])
os.environ["SUBMITIT_LOCAL_GLOBALID"] = "0"
os.execvp(words[0], words)' """


def test_on_this_machine_the_words_reach_apptainer_unchanged(stage: Stage) -> None:
    install(stage, apptainer=APPTAINER)
    put(stage.python, PYTHON.replace("  *) printf", '  *" submitit.local._local "*) ' + CONTROLLER + ";;\n  *) printf"))
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


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_signal_during_the_activation_starts_no_task(stage: Stage, launcher: Literal["slurm", "local"]) -> None:
    virtual(stage, "venv")
    with (stage.directory / "venv" / "bin" / "activate").open("a") as activate:
        activate.write('touch "$RECORD/activating"; while [[ -e $RECORD/hold ]]; do sleep 0.02; done\n')
    (stage.record / "hold").touch()
    process = stage.start(script_of(stage, launcher=launcher, environment={"venv": "venv"}), END_CODE="75")
    wait_for(stage.record / "activating")
    process.send_signal(signal.SIGTERM)
    (stage.record / "hold").unlink()
    assert stage.end_of(process) == 75
    assert stage.words("task") == []
    assert stage.words("end")[4:6] == ["--code", "143"]
