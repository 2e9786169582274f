from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from hpcddp import vendors
from hpcddp.batch.plan import PlanError
from hpcddp.jobfile.cluster import Cluster
from hpcddp.jobfile.job import JobSpec
from hpcddp.submission.checks import check_submittable
from hpcddp.submission.request import SubmissionError
from hpcddp.submission.submit import prepare
from tests.messages import GoldenMessages
from tests.submission.requests import request_of
from tests.submission.submitting import errors_of, program, spec_of, virtual, warnings_of


def test_everything_that_is_missing_is_said_at_once(here: Path, golden: GoldenMessages) -> None:
    environment = {"venv": "gone", "pass_env": ("TOKEN",)}
    train = {"model": "resnet18", "dataset": "imagefolder", "data_dir": "nowhere"}
    errors = errors_of(here, environment, "local", resources={"nodes": 2}, train=train)
    golden.message("\n".join(errors))
    nodes, variable, venv, data = errors
    assert nodes.startswith("resources.nodes is 2, ")
    assert nodes.endswith("add --set resources.nodes=1")
    assert variable.startswith("environment.pass_env names TOKEN, ")
    assert "; export it" in variable
    assert venv.startswith("environment.venv is 'gone', ")
    assert "(python -m venv gone)" in venv
    assert data.startswith("train.data_dir is 'nowhere', ")
    assert "that directory does not exist" in data


@pytest.mark.parametrize("nodelist", ["n1,n2", "n[1-2]", "n1,n2,n1"])
def test_a_list_of_more_nodes_than_the_job_has_is_refused(here: Path, golden: GoldenMessages, nodelist: str) -> None:
    (error,) = errors_of(here, {}, "slurm", resources={"nodelist": nodelist})
    message = golden.message(error)
    assert message.startswith(f"resources.nodes is 1, and resources.nodelist is {nodelist}, ")
    assert "write --nodes 2" in message
    assert warnings_of(here, {}, "slurm", resources={"nodes": 2, "nodelist": nodelist}) == []


@pytest.mark.parametrize("nodelist", ["./n1,n2", "n[1-"])
def test_a_list_of_nodes_that_only_sbatch_can_read_is_left_to_it(here: Path, nodelist: str) -> None:
    assert warnings_of(here, {}, "slurm", resources={"nodelist": nodelist}) == []


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "dev"
    directory.mkdir()
    (directory / "nvidiactl").touch()
    monkeypatch.setattr(vendors, "ROOT", tmp_path)
    return directory


def test_gpus_are_looked_for_on_this_machine_if_the_job_runs_here(
    here: Path, devices: Path, golden: GoldenMessages
) -> None:
    two = {"gpus_per_node": 2}

    def assert_refused(message: str, field: str, advice: str) -> None:
        assert golden.message(message).startswith(f"{field}, ")
        assert "no GPU in /dev; " in message
        assert message.endswith(f" add --set {advice}")

    (error,) = errors_of(here, {}, "local", resources=two)
    assert_refused(error, "resources.gpus_per_node is 2", "train.device=cpu")
    (error,) = errors_of(here, {}, "local", train={"model": "resnet18", "dataset": "digits", "device": "cuda"})
    assert_refused(error, "train.device is cuda", "train.device=cpu")
    on_cpus = {"model": "resnet18", "dataset": "digits", "device": "cpu"}
    assert warnings_of(here, {}, "local", resources=two, train=on_cpus) == []
    # A program may do without.
    program(here, "train")
    (warning,) = warnings_of(here, {}, "local", train=None, command=("train",), resources=two)
    advice = "resources.gpus_per_node=0 --set resources.tasks_per_node=2"
    assert_refused(warning, "resources.gpus_per_node is 2", advice)
    assert warnings_of(here, {}, "slurm", resources=two) == []
    forced = replace(request_of(spec_of({}, resources=two), cluster="local"), force=True)
    assert len(check_submittable(forced)) == 1
    (devices / "nvidia0").touch()
    assert warnings_of(here, {}, "local", resources=two) == []


def test_the_data_are_looked_for_where_a_mount_takes_them_from(here: Path, golden: GoldenMessages) -> None:
    program(here, "apptainer")
    Path("i.sif").touch()
    scratch = here / "scratch"
    (scratch / "train" / "cat").mkdir(parents=True)
    container = {"container": {"image": "i.sif", "runtime": "apptainer", "mounts": (f"{scratch}:/data",)}}
    train = {"model": "resnet18", "dataset": "imagefolder", "data_dir": "/data/train"}
    assert warnings_of(here, container, train=train) == []
    shutil.rmtree(scratch / "train")
    (error,) = errors_of(here, container, train=train)
    assert golden.message(error).startswith(f"train.data_dir is '/data/train', which is '{scratch}/train' here, ")


def test_the_environment_of_a_sweep_is_looked_at_once(here: Path) -> None:
    python = virtual(Path("venv")) / "bin" / "python"
    python.unlink()
    python.write_text(f'#!/bin/sh\necho look >> {here}/looks\nexec "$0"3 "$@"\n')
    python.chmod(0o700)
    sweep = {"learning_rate.base": [0.1, 0.2, 0.3, 0.4]}
    prepare(request_of(spec_of({"venv": "venv"}, sweep=sweep), environment={"PATH": "/usr/bin:/bin"}))
    assert (here / "looks").read_text() == "look\n"


def test_the_elements_of_a_sweep_have_the_same_launcher_and_ranks(here: Path, golden: GoldenMessages) -> None:
    Path("a.py").touch()
    job = {"train": None, "command": ("python", "a.py"), "resources": {"tasks_per_node": 2}}
    spec = spec_of({}, sweep={"command": [["python", "a.py"], ["torchrun", "a.py"]]}, **job)
    with pytest.raises(SubmissionError) as caught:
        prepare(request_of(spec, environment={"PATH": f"{here}/bin:/usr/bin:/bin"}))
    message = golden.message(caught.value)
    assert message.startswith("element 1 of the sweep, ")
    assert "needs 1 Slurm tasks for 2 ranks" in message


@pytest.mark.parametrize(
    "words", [["/bin/torchrun", "--nproc-per-node", "2"], ["python", "-m", "torch.distributed.run"]]
)
def test_torchrun_that_knows_of_one_task_only_is_refused_in_several(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: GoldenMessages
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

    for options in (("--standalone",), ("--nnodes", "1:1", "--rdzv-endpoint=localhost:29500")):
        with pytest.raises(SubmissionError, match=r"each of the 4 tasks .* a\.py$") as caught:
            checked(4, *options)
        golden.message(caught.value)
    assert (checked(1), checked(4, "--nnodes=4")) == ((), ())


@pytest.mark.parametrize(("limit", "earliest"), [("1min", "90s"), ("2min", "2min"), ("3min", "3min")])
def test_a_time_limit_that_slurm_may_warn_about_at_once_is_told(
    here: Path, golden: GoldenMessages, limit: str, earliest: str
) -> None:
    resources = {"time_limit": limit}
    (note,) = warnings_of(here, {}, resources=resources)
    message = golden.message(note)
    assert message.startswith(f"resources.time_limit is 00:0{limit[0]}:00, ")
    assert f" {earliest} before its end (requeue.signal_lead, and 1min earlier)" in message
    assert "or requeue.signal_lead null" in message
    program(here, "train")
    assert warnings_of(here, {}, train=None, command=("train",), resources=resources) == []
    assert warnings_of(here, {}, "local", resources={**resources, "tasks_per_node": 1}) == []


def test_a_time_limit_that_leaves_time_before_the_warning_is_not_told(here: Path) -> None:
    assert warnings_of(here, {}, resources={"time_limit": "4min"}) == []
    assert warnings_of(here, {}, resources={"time_limit": "2min"}, requeue={"signal_lead": "10s"}) == []
    assert warnings_of(here, {}, resources={"time_limit": "1min"}, requeue={"signal_lead": None}) == []


@pytest.mark.parametrize("cluster", ["local", "here"])
def test_only_slurm_chooses_from_a_range_of_nodes(here: Path, golden: GoldenMessages, cluster: Cluster) -> None:
    errors = errors_of(here, {}, cluster, resources={"nodes": "1-4"})
    (message,) = (error for error in errors if "a range " in error)
    golden.message(message)
    assert message.startswith("resources.nodes is 1-4, ")
    assert "add --set resources.nodes=" in message


def test_a_batch_that_one_number_of_a_range_cannot_split_is_refused(here: Path, golden: GoldenMessages) -> None:
    batch = {"global_batch_size": 64, "split": "error"}
    with pytest.raises(PlanError) as caught:
        warnings_of(here, {}, "slurm", resources={"nodes": "2-4"}, batch=batch)
    assert golden.message(caught.value).startswith("with 3 nodes of resources.nodes 2-4: ")
