from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from hpcddp.jobfile.job import JobSpec
from hpcddp.submission import checks
from hpcddp.submission.checks import check_submittable
from hpcddp.submission.request import SubmissionError
from hpcddp.submission.submit import prepare
from tests.submission.requests import request_of
from tests.submission.submitting import errors_of, program, spec_of, virtual, warnings_of


def test_everything_that_is_missing_is_said_at_once(here: Path) -> None:
    environment = {"venv": "gone", "pass_env": ("TOKEN",)}
    train = {"model": "resnet18", "dataset": "imagefolder", "data_dir": "nowhere"}
    assert errors_of(here, environment, "local", resources={"nodes": 2}, train=train) == [
        "resources.nodes is 2, but this machine is one node; add --set resources.nodes=1",
        "environment.pass_env names TOKEN, not set here; export it, or remove the name",
        (
            "environment.venv is 'gone', and there is no directory gone; make it (python -m venv gone), or correct "
            "the path"
        ),
        "train.data_dir is 'nowhere', and there is no such directory; give the directory that holds the data",
    ]


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "dev"
    directory.mkdir()
    (directory / "nvidiactl").touch()
    monkeypatch.setattr(checks, "DEVICES", directory)
    return directory


def test_gpus_are_looked_for_on_this_machine_if_the_job_runs_here(here: Path, devices: Path) -> None:
    two = {"gpus_per_node": 2}
    found = f"and this machine has no GPU in {devices}; to run on its CPUs, add --set"
    assert errors_of(here, {}, "local", resources=two) == [
        f"resources.gpus_per_node is 2, {found} train.device=cpu",
    ]
    assert errors_of(here, {}, "local", train={"model": "resnet18", "dataset": "digits", "device": "cuda"}) == [
        f"train.device is cuda, {found} train.device=cpu",
    ]
    on_cpus = {"model": "resnet18", "dataset": "digits", "device": "cpu"}
    assert warnings_of(here, {}, "local", resources=two, train=on_cpus) == []
    # A program may do without.
    program(here, "train")
    assert warnings_of(here, {}, "local", train=None, command=("train",), resources=two) == [
        f"resources.gpus_per_node is 2, {found} resources.gpus_per_node=0 --set resources.tasks_per_node=2",
    ]
    assert warnings_of(here, {}, "slurm", resources=two) == []
    forced = replace(request_of(spec_of({}, resources=two), cluster="local"), force=True)
    assert len(check_submittable(forced)) == 1
    (devices / "nvidia0").touch()
    assert warnings_of(here, {}, "local", resources=two) == []


def test_the_data_are_looked_for_where_a_mount_takes_them_from(here: Path) -> None:
    program(here, "apptainer")
    Path("i.sif").touch()
    scratch = here / "scratch"
    (scratch / "train").mkdir(parents=True)
    container = {"container": {"image": "i.sif", "runtime": "apptainer", "mounts": (f"{scratch}:/data",)}}
    train = {"model": "resnet18", "dataset": "imagefolder", "data_dir": "/data/train"}
    assert warnings_of(here, container, train=train) == []
    shutil.rmtree(scratch / "train")
    assert errors_of(here, container, train=train) == [
        (
            f"train.data_dir is '/data/train', which is '{scratch}/train' here, and there is no such directory; "
            "give the directory that holds the data"
        )
    ]


def test_the_environment_of_a_sweep_is_looked_at_once(here: Path) -> None:
    python = virtual(Path("venv")) / "bin" / "python"
    python.unlink()
    python.write_text(f'#!/bin/sh\necho look >> {here}/looks\nexec "$0"3 "$@"\n')
    python.chmod(0o700)
    sweep = {"learning_rate.base": [0.1, 0.2, 0.3, 0.4]}
    prepare(request_of(spec_of({"venv": "venv"}, sweep=sweep), environment={"PATH": "/usr/bin:/bin"}))
    assert (here / "looks").read_text() == "look\n"


def test_the_elements_of_a_sweep_have_the_same_launcher_and_ranks(here: Path) -> None:
    Path("a.py").touch()
    job = {"train": None, "command": ("python", "a.py"), "resources": {"tasks_per_node": 2}}
    spec = spec_of({}, sweep={"command": [["python", "a.py"], ["torchrun", "a.py"]]}, **job)
    with pytest.raises(SubmissionError, match=r"element 1 of the sweep, .* needs 1 Slurm tasks for 2 ranks"):
        prepare(request_of(spec, environment={"PATH": f"{here}/bin:/usr/bin:/bin"}))


@pytest.mark.parametrize(
    "words", [["/bin/torchrun", "--nproc-per-node", "2"], ["python", "-m", "torch.distributed.run"]]
)
def test_torchrun_that_knows_of_one_task_only_is_refused_in_several(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").touch()
    (tmp_path / "bin").mkdir()
    for name in ("python", "torchrun"):
        program(tmp_path, name)
    words[0] = str(tmp_path / "bin" / Path(words[0]).name)

    def checked(tasks: int, *options: str) -> tuple[str, ...]:
        job = {"name": "a", "resources": {"tasks_per_node": tasks}, "command": [*words, *options, "a.py"]}
        return check_submittable(request_of(JobSpec.model_validate(job), environment={"PATH": "/usr/bin:/bin"}))

    refusal = r"each of the 4 tasks would start a training of its own; leave .* a\.py$"
    for options in (("--standalone",), ("--nnodes", "1:1", "--rdzv-endpoint=localhost:29500")):
        with pytest.raises(SubmissionError, match=refusal):
            checked(4, *options)
    assert (checked(1), checked(4, "--nnodes=4")) == ((), ())


@pytest.mark.parametrize(("limit", "earliest"), [("1min", "90s"), ("2min", "2min"), ("3min", "3min")])
def test_a_time_limit_that_slurm_may_warn_about_at_once_is_told(here: Path, limit: str, earliest: str) -> None:
    resources = {"time_limit": limit}
    (note,) = warnings_of(here, {}, resources=resources)
    assert note == (
        f"resources.time_limit is 00:0{limit[0]}:00, and Slurm may warn the job {earliest} before its end "
        "(requeue.signal_lead, and 1min earlier), so that it stops soon after its start; write a longer limit, or "
        "requeue.signal_lead null, with which it stops by the clock"
    )
    program(here, "train")
    assert warnings_of(here, {}, train=None, command=("train",), resources=resources) == []
    assert warnings_of(here, {}, "local", resources={**resources, "tasks_per_node": 1}) == []


def test_a_time_limit_that_leaves_time_before_the_warning_is_not_told(here: Path) -> None:
    assert warnings_of(here, {}, resources={"time_limit": "4min"}) == []
    assert warnings_of(here, {}, resources={"time_limit": "2min"}, requeue={"signal_lead": "10s"}) == []
    assert warnings_of(here, {}, resources={"time_limit": "1min"}, requeue={"signal_lead": None}) == []
