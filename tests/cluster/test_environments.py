"""Modules, conda, venv, uv and containers on a real Slurm: the tasks run where they were sent, on more than one host.

Modules, venv and uv are the real ones. conda is a program with the hook of the real one; apptainer and pyxis are those
of ``containers.py``, which give a task a root directory and an environment of its own.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hpcddp.run.directory import RunDirectory
from hpcddp.run.events import read_events
from hpcddp.slurm.job import ENDED_STATES
from tests.cluster.containers import install, write_image
from tests.cluster.jobs import result_of, submit, write_job
from tests.cluster.models import SEE, SLOW_MODEL
from tests.cluster.sandbox import Sandbox
from tests.submission.fake_environments import CONDA
from tests.waiting import wait_for_text

pytestmark = pytest.mark.depends_on(
    "hpcddp/jobfile/environment.py",
    "hpcddp/submission",
    "hpcddp/task",
    "templates",
    "tests/cluster/test_environments.py",
)
ROOT = Path(__file__).parents[2]
PACKAGES = [str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))]


@dataclass(frozen=True)
class SubmittedJob:
    """A job that was submitted from a directory of its own."""

    directory: Path
    answer: dict[str, Any]

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(Path(self.answer["run_dir"]))

    def seen(self, rank: int) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.directory / f"seen-{rank}.json").read_text())
        return document


class Submitter:
    """Submits the jobs of this file.

    Args:
        sandbox: the Slurm.
        directory: for their files.
    """

    def __init__(self, sandbox: Sandbox, directory: Path) -> None:
        self.sandbox, self.directory = sandbox, directory
        self.programs = directory / "bin"
        self.programs.mkdir()
        install(self.programs)
        (self.programs / "conda").write_text(CONDA)
        (self.programs / "conda").chmod(0o755)
        # What lies outside of a job's directory; a container does not see it.
        (directory / "scratch").mkdir()
        (directory / "scratch" / "sample").touch()

    def send(
        self, name: str, environment: dict[str, Any], *, nodes: int = 1, program: bool = False, **job: Any
    ) -> SubmittedJob:
        """Submit a training, or ``python see.py``, from a directory of its own."""
        directory = self.directory / name
        directory.mkdir()
        (directory / "small.py").write_text(SLOW_MODEL)
        (directory / "see.py").write_text(SEE)
        sections = {"environment": {"python": None, "env": {"OMP_NUM_THREADS": "1"}, **environment}, **job}
        path = write_job(directory, nodes=nodes, epochs=1, sections=sections)
        if program:
            parts = json.loads(path.read_text())
            del parts["train"], parts["batch"], parts["learning_rate"]
            path.write_text(json.dumps({**parts, "command": ["python", "see.py"]}))
        variables = {"PATH": f"{self.programs}:{self.sandbox.environment['PATH']}", "TOKEN": "s3cret"}
        return SubmittedJob(directory, submit(self.sandbox, path, env=variables))

    def virtual(self, name: str) -> Path:
        """Make a virtual environment that sees this interpreter's packages."""
        path = self.directory / name
        venv.create(path, symlinks=True)
        self.show_packages(path)
        return path

    def show_packages(self, path: Path) -> None:
        (packages,) = path.glob("lib/python*/site-packages")
        (packages / "seen.pth").write_text("\n".join(PACKAGES))


@pytest.fixture(scope="module")
def submitter(sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Submitter:
    return Submitter(sandbox, tmp_path_factory.mktemp("environments"))


def container_of(submitter: Submitter, runtime: str, **more: Any) -> dict[str, Any]:
    image = write_image(submitter.directory / "i.sif", ROOT, HF_HOME="of the image", TOKEN="of the image", OTHER="kept")
    mounts = [f"{submitter.directory}/scratch:/data:ro"]
    return {
        "container": {"image": str(image), "runtime": runtime, "mounts": mounts},
        "env": {"HF_HOME": "of the job", "OMP_NUM_THREADS": "1"},
        "pass_env": ["TOKEN"],
        **more,
    }


@pytest.fixture(scope="module")
def jobs(submitter: Submitter) -> Iterator[dict[str, SubmittedJob]]:
    """Submit all of them at once, and wait for their ends."""
    sent = {
        "venv": submitter.send(
            "venv", {"venv": str(submitter.virtual("my venv"))}, nodes=2, program=True, resources={"nodelist": "n3,n4"}
        ),
        "pyxis": submitter.send("pyxis", container_of(submitter, "pyxis"), program=True, resources={"nodelist": "n3"}),
        "bare": submitter.send("bare", bare_container(submitter), resources={"nodelist": "n4"}),
        "uv": submitter.send("uv", {"uv": str(uv_project(submitter))}, program=True),
        "conda": submitter.send("conda", {"conda": str(submitter.virtual("envs/train"))}, program=True),
        "modules": submitter.send("modules", modules(submitter), program=True),
        "venv in apptainer": submitter.send("inside", inside_container(submitter), program=True),
        # The last one: on a busy machine it could finish while the others are submitted, before it is preempted.
        "apptainer": submitter.send(
            "apptainer",
            container_of(submitter, "apptainer"),
            nodes=2,
            resources={"partition": "low", "nodelist": "n1,n2"},
            train={"model_args": {"seconds": 0.05}, "epochs": 12},
        ),
    }
    wait_for_text(sent["apptainer"].run.metrics, '"step": 100')
    submitter.sandbox.submit("--partition=high", "--exclusive", "--nodelist=n1", "--output=/dev/null", "--wrap=sleep 1")
    for job in sent.values():
        submitter.sandbox.wait(job.answer["job_id"], states=ENDED_STATES, timeout=300)
    yield sent
    submitter.sandbox.cancel_all()


def bare_container(submitter: Submitter) -> dict[str, Any]:
    """Return a container whose interpreter has no hpcddp."""
    image = write_image(submitter.directory / "bare.sif")
    python = f"{sys.base_prefix}/bin/python3"
    return {"container": {"image": str(image), "runtime": "apptainer", "python": python}}


def inside_container(submitter: Submitter) -> dict[str, Any]:
    """Return a container whose interpreter is that of a virtual environment in it."""
    inside = submitter.virtual("inside-venv")
    image = write_image(submitter.directory / "with-venv.sif", ROOT, inside)
    return {"container": {"image": str(image), "runtime": "apptainer", "python": f"{inside}/bin/python"}}


def uv_project(submitter: Submitter) -> Path:
    project = submitter.directory / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text('[project]\nname = "p"\nversion = "1"\nrequires-python = ">=3.11"\n')
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{submitter.sandbox.environment['PATH']}")
    assert uv is not None, "uv is one of the tools of the group dev"
    words = [uv, "sync", "--offline", "--quiet", "--python", sys.executable, "--project", str(project)]
    subprocess.run(words, check=True, timeout=60, env=submitter.sandbox.environment)
    submitter.show_packages(project / ".venv")
    return project


def modules(submitter: Submitter) -> dict[str, Any]:
    """Return an environment with a real module that puts an interpreter in front."""
    tree = submitter.directory / "modulefiles"
    tree.mkdir()
    (tree / "train").write_text("#%Module1.0\nsetenv FROM_MODULE loaded\n")
    assert Path("/etc/profile.d/modules.sh").is_file(), "environment-modules is one of the packages of scripts/test"
    return {"modules": [str(tree / "train")]}


def finished(job: SubmittedJob) -> dict[str, Any]:
    result = result_of(job.run)
    assert result["status"] == "finished", result
    return result


def test_tasks_on_every_host_run_in_the_virtual_environment(
    submitter: Submitter, jobs: dict[str, SubmittedJob]
) -> None:
    finished(jobs["venv"])
    prefix = str(submitter.directory / "my venv")
    seen = [jobs["venv"].seen(rank) for rank in range(2)]
    assert [one["prefix"] for one in seen] == [prefix, prefix]
    assert [one["python"] for one in seen] == [f"{prefix}/bin/python"] * 2
    assert [one["host"] for one in seen] == ["n3", "n4"]


def test_tasks_run_in_the_environment_of_a_uv_project_without_uv(
    submitter: Submitter, jobs: dict[str, SubmittedJob]
) -> None:
    finished(jobs["uv"])
    seen = jobs["uv"].seen(0)
    assert seen["prefix"] == str(submitter.directory / "project" / ".venv")
    assert seen["python"] == f"{seen['prefix']}/bin/python"
    assert seen["variables"]["UV_NO_SYNC"] == "1"


def test_tasks_run_in_the_conda_environment(submitter: Submitter, jobs: dict[str, SubmittedJob]) -> None:
    finished(jobs["conda"])
    seen = jobs["conda"].seen(0)
    assert seen["prefix"] == seen["variables"]["CONDA_PREFIX"] == str(submitter.directory / "envs" / "train")
    assert seen["python"] == f"{seen['prefix']}/bin/python"


def test_python_in_a_container_is_the_interpreter_that_was_chosen_there(
    submitter: Submitter, jobs: dict[str, SubmittedJob]
) -> None:
    finished(jobs["venv in apptainer"])
    assert jobs["venv in apptainer"].seen(0)["prefix"] == str(submitter.directory / "inside-venv")


def test_a_real_module_is_loaded_although_the_shell_that_submits_has_no_module_command(
    jobs: dict[str, SubmittedJob],
) -> None:
    finished(jobs["modules"])
    assert jobs["modules"].seen(0)["variables"]["FROM_MODULE"] == "loaded"


@pytest.mark.parametrize("runtime", ["apptainer", "pyxis"])
def test_tasks_run_in_the_container_and_see_the_job_and_its_mounts_alone(
    runtime: str, jobs: dict[str, SubmittedJob]
) -> None:
    job = jobs[runtime]
    finished(job)
    seen = job.seen(0)
    assert seen["cwd"] == str(job.directory)
    assert {"job.yaml", "runs", "small.py"} <= set(seen["here"])
    assert seen["data"] == ["sample"]
    assert "home" not in seen["root"]
    assert "data" in seen["root"]


@pytest.mark.parametrize("runtime", ["apptainer", "pyxis"])
def test_variables_of_the_job_and_its_secrets_win_over_those_of_the_image(
    runtime: str, jobs: dict[str, SubmittedJob]
) -> None:
    variables = jobs[runtime].seen(0)["variables"]
    assert (variables["HF_HOME"], variables["TOKEN"], variables["OTHER"]) == ("of the job", "s3cret", "kept")
    assert variables["SLURM_JOB_ID"] == jobs[runtime].answer["job_id"]
    run = jobs[runtime].run
    assert all(b"s3cret" not in path.read_bytes() for path in run.path.rglob("*") if path.is_file())


def test_a_preemption_reaches_the_tasks_in_their_containers_and_nothing_is_lost(jobs: dict[str, SubmittedJob]) -> None:
    run = jobs["apptainer"].run
    result = finished(jobs["apptainer"])
    assert result["attempts"] == 2
    # The task cannot ask Slurm from in there; the batch script, which is outside, can.
    (requeue,) = (event for event in read_events(run.events) if event.kind == "requeue")
    assert requeue.cause == "preemption"
    steps = [record["step"] for record in map(json.loads, run.metrics.read_text().splitlines()) if "loss" in record]
    assert steps == list(range(1, result["steps"] + 1))


def test_an_image_without_hpcddp_is_said_in_one_sentence(jobs: dict[str, SubmittedJob]) -> None:
    result = result_of(jobs["bare"].run)
    python = f"{sys.base_prefix}/bin/python3"
    assert (result["status"], result["reason"]) == (
        "failed",
        (
            f"rank 0 did not start: {python} in the container cannot run hpcddp; install hpcddp in the image, or write "
            "another interpreter of it as environment.container.python; not requeued, because requeue.max_failures is 0"
        ),
    )
