from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcddp.jobfile.problems import JobFileError
from hpcddp.jobfile.profiles import read_profile
from hpcddp.jobfile.read import ResolvedJob
from tests.facts import assert_facts

Load = Callable[..., ResolvedJob]
Refuse = Callable[..., list[str]]
Write = Callable[[str, str], Path]


@pytest.fixture
def profile(tmp_path: Path) -> Write:
    def write(name: str, text: str) -> Path:
        directory = tmp_path / "profiles"
        directory.mkdir(exist_ok=True)
        (directory / f"{name}.yaml").write_text(text, encoding="utf-8")
        return directory

    return write


def test_the_default_profile_lies_under_the_job_file(load: Load, profile: Write) -> None:
    profiles = profile("default", "run_root: /scratch/runs\nresources: {partition: gpu, nodes: 4}\n")
    spec = load("resources: {nodes: 2}\n", profiles=profiles).spec
    assert (spec.run_root, spec.resources.partition, spec.resources.nodes) == ("/scratch/runs", "gpu", 2)
    assert spec.profile is None


def test_a_named_profile_takes_the_place_of_the_default_one(load: Load, profile: Write) -> None:
    profile("default", "resources: {partition: gpu}\n")
    profiles = profile("big", "resources: {qos: long}\n")
    for job in (load("profile: big\n", profiles=profiles), load(sets=("profile=big",), profiles=profiles)):
        assert (job.spec.resources.partition, job.spec.resources.qos) == (None, "long")
        assert job.origins["resources.qos"] == "profile big"


def test_no_profile_is_needed(load: Load, tmp_path: Path) -> None:
    assert load(profiles=tmp_path / "nowhere").spec.resources.partition is None


def test_null_in_the_job_file_takes_a_value_of_the_profile_away(load: Load, profile: Write) -> None:
    profiles = profile("default", "resources: {mem: 64G}\n")
    job = load("resources: {mem: null, mem_per_cpu: 2G}\n", profiles=profiles)
    assert (job.spec.resources.mem, job.origins["resources.mem"]) == (None, "job file")


def test_null_takes_the_value_of_a_key_or_of_a_field_that_cannot_be_null_away(load: Load, profile: Write) -> None:
    profiles = profile("default", "resources: {cpus_per_task: 4, srun: {mpi: pmix, cpu-bind: cores, hint: x}}\n")
    more = "resources: {cpus_per_task: null, srun: {mpi: null, hint: nomultithread}}\n"
    resources = load(more, profiles=profiles).spec.resources
    assert resources.srun == {"cpu-bind": "cores", "hint": "nomultithread"}
    assert resources.cpus_per_task == 1


def test_null_that_takes_nothing_away_is_refused(refuse: Refuse, profile: Write) -> None:
    profiles = profile("default", "resources: {srun: {mpi: pmix}}\n")
    (line,) = refuse("resources: {srun: {cpu-bind: null}}\n", profiles=profiles)
    assert line.startswith("job.yaml:4: resources.srun.cpu-bind: is empty, ")


def test_null_takes_a_mapping_of_the_profile_away(load: Load, profile: Write) -> None:
    profiles = profile(
        "default",
        "resources: {nodes: 2, srun: {mpi: pmix}, sbatch: {switches: 1}}\nenvironment: {env: {A: x}, modules: [a]}\n",
    )
    more = "resources:\n  srun:\n  sbatch: null\nenvironment: {env: null, modules: null}\n"
    spec = load(more, profiles=profiles).spec
    assert (spec.resources.srun, spec.resources.sbatch, spec.environment.env) == ({}, {}, {})
    assert (spec.resources.nodes, spec.environment.modules) == (2, ())
    emptied = load(more, profiles=profiles, sets=("environment.env.B=y",)).spec
    assert emptied.environment.env == {"B": "y"}
    # A section without keys takes nothing away: they may all be comments.
    assert load("resources:\n", profiles=profiles).spec.resources.nodes == 2


@pytest.mark.parametrize(
    ("text", "more", "override", "facts"),
    [
        ("resources: [a]\n", "resources: {nodes: 2}\n", None, ("1: resources: is a list", "expected a section")),
        ("resources: none\n", "", "resources.nodes=2", ("1: resources: is 'none'", "expected a section")),
        ("resources: ''\n", "resources:\n", None, ("1: resources: is ''", "expected a section")),
        (
            "resources:\n  - gpus_per_node: 8\n",
            "resources: {srun: {mpi: pmix}}\n",
            "resources.srun.hint=x",
            ("1: resources: is a list", "expected a section"),
        ),
        (
            "resources: {srun: cores}\n",
            "",
            "resources.srun.mpi=pmix",
            ("1: resources.srun: is 'cores'", "expected a mapping"),
        ),
        (
            "resources:\n  srun: [a]\n",
            "resources: {srun: {mpi: pmix}}\n",
            None,
            ("2: resources.srun: is a list", "expected a mapping"),
        ),
        ("environment: [a]\n", "", "environment.env.A=b", ("1: environment: is a list", "expected a section")),
    ],
)
def test_a_section_without_keys_is_refused_also_below_keys_that_are_set(
    text: str,
    more: str,
    override: str | None,
    facts: tuple[str, ...],
    load: Load,
    refuse: Refuse,
    profile: Write,
    tmp_path: Path,
) -> None:
    sets = (override,) if override else ()
    (line,) = refuse(more, sets=sets, profiles=profile("default", text))
    assert_facts(line, f"profiles/default.yaml:{facts[0]}", facts[1])
    project = tmp_path / "hpcddp.yaml"
    project.write_text(text, encoding="utf-8")
    project.chmod(0o644)
    with pytest.raises(JobFileError, match=re.escape(f"hpcddp.yaml:{facts[0]}")):
        load(more, sets=sets, project=project)


def test_lists_are_replaced_and_open_mappings_merge(load: Load, profile: Write) -> None:
    profiles = profile("default", "environment: {modules: [a], env: {A: '1'}}\ncheckpoint: {every: {steps: 5}}\n")
    spec = load(
        "environment: {modules: [b], env: {B: '2'}}\ncheckpoint: {every: {epochs: 1}}\n", profiles=profiles
    ).spec
    assert (spec.environment.modules, spec.environment.env) == (("b",), {"A": "1", "B": "2"})
    assert spec.checkpoint.every.epochs == 1


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        (
            "resources:\n  # gpus\n  nods: 4\n",
            ("profiles/default.yaml:3: resources.nods", "did you mean resources.nodes?"),
        ),
        (
            "resources: {nodes: -1}\n",
            ("profiles/default.yaml:1: resources.nodes: is -1", "at least 1", "write 1 or more"),
        ),
        (
            "train: {epochs: 3}\n",
            ("profiles/default.yaml:1: train", "write it in the job file"),
        ),
        (
            "resources:\n  partition: 010\n",
            ("profiles/default.yaml:2: resources.partition: is 010", "put double quotes around it"),
        ),
        (
            "resources:\n  mem: !size 4G\n",
            ("profiles/default.yaml:2: resources.mem: has a tag (!)", "remove it"),
        ),
        (
            "resources:\n  nodes: [2\n",
            ("profiles/default.yaml:2: is not valid YAML", "check indentation, quotes and brackets"),
        ),
        ("a: \0", ("profiles/default.yaml: contains NUL bytes", "check the path")),
    ],
)
def test_an_error_of_the_profile_names_its_file_and_line(
    text: str, facts: tuple[str, ...], refuse: Refuse, profile: Write
) -> None:
    (line,) = refuse(profiles=profile("default", text))
    assert_facts(line, *facts)


def test_a_profile_that_is_missing_is_named_where_it_is_asked_for(
    refuse: Refuse, profile: Write, tmp_path: Path
) -> None:
    profiles = profile("cluster-a", "")
    (line,) = refuse("profile: cluster_b\n", profiles=profiles)
    assert_facts(line, "job.yaml:4: profile: is 'cluster_b'", "did you mean cluster-a?")
    (line,) = refuse(sets=("profile=x",), profiles=profiles)
    assert_facts(line, "--set profile: is 'x'", "the profiles are cluster-a")
    (line,) = refuse("profile: x\n", profiles=tmp_path / "none")
    assert_facts(line, "job.yaml:4: profile: is 'x'", "none/x.yaml with hpcddp init x", "leave profile out")
    (line,) = refuse("profile: x\n")
    assert_facts(line, "job.yaml:4: profile: is 'x'", "leave profile out")


def test_the_name_of_a_profile_is_no_path(refuse: Refuse, profile: Write) -> None:
    (line,) = refuse("profile: ../default\n", profiles=profile("default", ""))
    assert_facts(line, "job.yaml:4: profile: is '../default'", "the directory of profiles, without .yaml")


def test_a_directory_of_profiles_that_cannot_be_looked_into_holds_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> os.stat_result:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "stat", refuse)
    assert read_profile(None, tmp_path) is None


CLUSTER = "cluster:\n  name: hpc1\n  partitions:\n    gpu.v100:\n      kinds: [{nodes: 1}]\n"


def test_facts_about_the_cluster_are_known_and_enter_no_job(load: Load, profile: Write) -> None:
    job = load(profiles=profile("default", "cluster: {name: hpc1, something_newer: 1}\n"))
    assert job.cluster is not None
    assert (job.profile, job.cluster.name, job.cluster.default_partition) == ("default", "hpc1", None)
    assert not [key for key in job.origins if key.startswith("cluster")]
    bare = load(profiles=profile("default", "resources: {nodes: 1}\n"))
    assert (bare.profile, bare.cluster) == ("default", None)
    without = load()
    assert (without.profile, without.cluster) == (None, None)


def test_a_fact_that_is_none_names_its_line(refuse: Refuse, profile: Write) -> None:
    way_out = ("hpcddp init default --force", "remove the section cluster")
    cpus, memory = refuse(profiles=profile("default", CLUSTER))
    kind = "profiles/default.yaml:5: cluster.partitions.gpu.v100.kinds.0"
    assert_facts(cpus, f"{kind}.cpus: is missing", *way_out)
    assert_facts(memory, f"{kind}.mem_mb: is missing", *way_out)
    (line,) = refuse(profiles=profile("default", "cluster:\n  name: x\n  max_array_size: many\n"))
    assert_facts(line, "profiles/default.yaml:3: cluster.max_array_size: is 'many'", *way_out)


def test_a_profile_in_toml_is_refused_until_it_is_written_anew(load: Load, refuse: Refuse, profile: Write) -> None:
    profiles = profile("cluster-a", "")
    (profiles / "default.toml").write_text("[resources]\nnodes = 2\n")
    (line,) = refuse(profiles=profiles)
    assert_facts(line, "profiles/default.toml: is TOML", "write it anew with hpcddp init default")
    profile("default", "resources: {nodes: 3}\n")
    assert load(profiles=profiles).spec.resources.nodes == 3


def test_a_section_whose_settings_are_all_comments_is_empty(load: Load, profile: Write) -> None:
    assert load(profiles=profile("default", "resources:\n  # nodes: 2\n")).spec.resources.nodes == 1
    assert load(profiles=profile("default", "# nothing\n")).profile == "default"
