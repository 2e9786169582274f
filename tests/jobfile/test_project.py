from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcddp.jobfile.problems import JobFileError
from hpcddp.jobfile.profiles import find_project_file, read_project
from hpcddp.jobfile.read import ResolvedJob
from tests.facts import assert_facts
from tests.messages import GoldenMessages

Load = Callable[..., ResolvedJob]
Refuse = Callable[..., list[str]]


@pytest.fixture
def project(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        file = tmp_path / "hpcddp.yaml"
        file.write_text(text, encoding="utf-8")
        return file

    return write


@pytest.fixture
def profiles(tmp_path: Path) -> Path:
    directory = tmp_path / "profiles"
    directory.mkdir()
    (directory / "default.yaml").write_text("resources: {partition: gpu, nodes: 4, qos: long}\n")
    (directory / "big.yaml").write_text("resources: {account: lab}\n")
    return directory


def test_the_project_lies_over_the_profile_and_under_the_job_file(
    load: Load, project: Callable[[str], Path], profiles: Path
) -> None:
    file = project("run_root: /scratch/us\nresources: {nodes: 3, partition: small, cpus_per_task: 7}\n")
    job = load("resources: {nodes: 2}\n", project=file, profiles=profiles, sets=("resources.cpus_per_task=1",))
    resources = job.spec.resources
    assert (resources.qos, resources.partition, resources.nodes, resources.cpus_per_task) == ("long", "small", 2, 1)
    assert {key: job.origins[key] for key in ("run_root", "launch.hang_timeout")} == {
        "run_root": "project hpcddp.yaml",
        "launch.hang_timeout": "default",
    }
    names = ("qos", "partition", "nodes", "cpus_per_task")
    assert [job.origins[f"resources.{name}"] for name in names] == [
        "profile default",
        "project hpcddp.yaml",
        "job file",
        "--set",
    ]


def test_the_project_may_name_the_profile_unless_the_job_does(
    load: Load, project: Callable[[str], Path], profiles: Path
) -> None:
    file = project("profile: big\n")
    job = load(project=file, profiles=profiles)
    assert (job.profile, job.spec.profile, job.spec.resources.account) == ("big", "big", "lab")
    assert job.origins["profile"] == "project hpcddp.yaml"
    assert job.origins["resources.account"] == "profile big"
    for other in (
        load("profile: default\n", project=file, profiles=profiles),
        load("profile: null\n", project=file, profiles=profiles),
        load(project=file, profiles=profiles, sets=("profile=default",)),
    ):
        assert (other.profile, other.spec.resources.qos) == ("default", "long")


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        (
            "resources:\n\n  nods: 2\n",
            ("hpcddp.yaml:3: resources.nods", "did you mean resources.nodes?"),
        ),
        (
            "profil: x\n",
            ("hpcddp.yaml:1: profil", "did you mean profile?"),
        ),
        (
            "cluster: {name: x}\n",
            ("hpcddp.yaml:1: cluster", "write it in the job file"),
        ),
        (
            "resources: [a\n",
            ("hpcddp.yaml:1: is not valid YAML", "check indentation, quotes and brackets"),
        ),
        (
            "# ours\nprofile: bigg\n",
            ("hpcddp.yaml:2: profile: is 'bigg'", "did you mean big?"),
        ),
        (
            "profile: 3\n",
            ("hpcddp.yaml:1: profile: is 3", "put double quotes around it"),
        ),
    ],
)
def test_an_error_of_the_project_names_its_file_and_line(
    text: str, facts: tuple[str, ...], refuse: Refuse, project: Callable[[str], Path], profiles: Path
) -> None:
    (line,) = refuse(project=project(text), profiles=profiles)
    assert_facts(line, *facts)


def write(file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("")
    return file


def test_the_file_of_the_directory_or_of_the_nearest_one_above_in_the_project_counts(tmp_path: Path) -> None:
    deep = tmp_path / "project" / "a" / "b"
    deep.mkdir(parents=True)
    assert find_project_file(deep, home=None) is None
    write(tmp_path / "hpcddp.yaml")
    in_project = write(tmp_path / "project" / "hpcddp.yaml")
    # Nothing says where the project begins, so what lies above is not its own.
    assert find_project_file(deep, home=None) is None
    (tmp_path / "project" / ".git").mkdir()
    assert find_project_file(deep, home=None) == in_project
    here = write(deep / "hpcddp.yaml")
    assert find_project_file(deep, home=None) == here
    here.unlink()
    in_project.unlink()
    assert find_project_file(deep, home=tmp_path) is None


def test_without_a_project_the_home_directory_is_the_last_one(tmp_path: Path) -> None:
    home = tmp_path / "home" / "me"
    deep = home / "a" / "b"
    deep.mkdir(parents=True)
    write(tmp_path / "hpcddp.yaml")
    assert find_project_file(deep, home=home) is None
    of_home = write(home / "hpcddp.yaml")
    assert find_project_file(deep, home=home) == of_home
    assert find_project_file(tmp_path / "home", home=home) is None


def test_a_file_that_somebody_else_has_put_above_or_here_is_refused(tmp_path: Path, golden: GoldenMessages) -> None:
    file = write(tmp_path / "hpcddp.yaml")
    if os.geteuid() == 0:
        os.chown(file, 12345, -1)  # What root owns is trusted.
    owner = file.stat().st_uid
    with pytest.raises(JobFileError) as above:
        read_project(file, directory=tmp_path / "a", user_id=owner + 1)
    assert_facts(golden.message(above.value), "belongs to another user", "above this directory", "copy it here")
    with pytest.raises(JobFileError) as here:
        read_project(file, directory=tmp_path, user_id=owner + 1)
    assert_facts(golden.message(here.value), "belongs to another user", "is here", "make it your own")
    assert read_project(file, directory=tmp_path / "a", user_id=owner).value == {}


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_can_write_to_is_refused(tmp_path: Path, mode: int, golden: GoldenMessages) -> None:
    file = write(tmp_path / "hpcddp.yaml")
    file.chmod(mode)
    with pytest.raises(JobFileError) as caught:
        read_project(file, directory=tmp_path, user_id=os.geteuid())
    assert_facts(golden.message(caught.value), "can be written by others", f"run: chmod go-w {file}")


def test_a_project_file_in_toml_is_refused(refuse: Refuse, tmp_path: Path) -> None:
    file = write(tmp_path / "hpcddp.toml")
    assert find_project_file(tmp_path, home=None) == file
    (line,) = refuse(project=file)
    assert_facts(line, "hpcddp.toml: is TOML", "write its settings into hpcddp.yaml")
