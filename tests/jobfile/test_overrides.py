from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hpcddp.jobfile.overrides import Override, read_override
from hpcddp.jobfile.read import ResolvedJob
from tests.facts import assert_facts

Load = Callable[..., ResolvedJob]
Refuse = Callable[..., list[str]]


def field(job: ResolvedJob, key: str) -> Any:
    value: Any = job.spec
    for part in key.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return value


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("train.epochs=3", "train.epochs", 3),
        ("train.epochs= 3 ", "train.epochs", 3),
        ("train.seed=010", "train.seed", 10),
        ("learning_rate.base=1e-3", "learning_rate.base", 0.001),
        ("resources.partition=on", "resources.partition", "on"),
        ('resources.partition="12"', "resources.partition", "12"),
        ("resources.constraint=a&b", "resources.constraint", "a&b"),
        ("run_root=/a b/c", "run_root", "/a b/c"),
        ("requeue.causes=[]", "requeue.causes", ()),
        ("environment.setup=[echo a, echo b]", "environment.setup", ("echo a", "echo b")),
        ("environment.env.A=b=c", "environment.env.A", "b=c"),
        ("environment.env={A: b}", "environment.env", {"A": "b"}),
        ("resources.sbatch.switches=1", "resources.sbatch.switches", "1"),
        ("resources.sbatch.overcommit=true", "resources.sbatch.overcommit", True),
        ("train.model_args.a.b=[1, {c: 2}]", "train.model_args", {"a": {"b": [1, {"c": 2}]}}),
        ("train.model=my.models:build", "train.model", "my.models:build"),
        ("resources={nodes: 2}", "resources.nodes", 2),
    ],
)
def test_a_value_is_read_as_yaml(text: str, key: str, value: object, load: Load) -> None:
    job = load(sets=(text,))
    assert field(job, key) == value


def test_the_last_of_two_overrides_counts(load: Load) -> None:
    assert load(sets=("train.epochs=3", "train.epochs=4")).spec.train.epochs == 4  # type: ignore[union-attr]


def test_a_section_is_replaced_as_a_whole(load: Load) -> None:
    resources = load("resources: {nodes: 2, partition: gpu}\n", sets=("resources={nodes: 3}",)).spec.resources
    assert (resources.nodes, resources.partition) == (3, None)


def test_null_unsets_what_the_file_sets(load: Load) -> None:
    more = "resources: {nodes: 2, partition: gpu, sbatch: {switches: 1}}\nenvironment: {env: {A: x, B: x}}\n"
    unset = ("resources.nodes=null", "resources.partition=null", "resources.sbatch=null", "environment.env.A=~")
    job = load(more, sets=unset)
    assert (job.spec.resources.nodes, job.spec.resources.partition) == (1, None)
    assert (job.spec.resources.sbatch, job.spec.environment.env) == ({}, {"B": "x"})
    assert job.origins["resources.nodes"] == "default"
    assert job.origins["resources.partition"] == "--set"


def test_an_override_repairs_the_file(load: Load) -> None:
    assert load("resources: 5\n", sets=("resources={nodes: 2}",)).spec.resources.nodes == 2


def test_one_key_does_not_repair_a_section_that_is_none(refuse: Refuse) -> None:
    (line,) = refuse("resources: 5\n", sets=("resources.nodes=2",))
    assert_facts(line, "job.yaml:4: resources: is 5", "expected a section")


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("hunter2", ("--set: is not KEY.PATH=VALUE", "write for example --set train.epochs=5")),
        ("=3", ("--set: is not KEY.PATH=VALUE", "write for example --set train.epochs=5")),
        ("train..epochs=3", ("--set: is not KEY.PATH=VALUE", "write for example --set train.epochs=5")),
        ("train.epoch=3", ("--set train.epoch", "did you mean train.epochs?")),
        ("trian.epochs=3", ("--set trian.epochs", "did you mean train?")),
        (
            "resources.nodes.x=3",
            ("--set resources.nodes.x", "write resources.nodes alone"),
        ),
        (
            "train.model=ResNet18",
            ("--set train.model: is 'ResNet18'", "did you mean resnet18?", "pkg.module:function"),
        ),
        ("resources.nodes=-1", ("--set resources.nodes: is -1", "at least 1", "write 1 or more")),
        (
            "resources={nodes: -1}",
            ("--set resources: resources.nodes: is -1", "at least 1", "write 1 or more"),
        ),
        (
            "resources.nodes=two",
            ("--set resources.nodes: is 'two'", "an integer", "write one without quotes, point or unit"),
        ),
        (
            "learning_rate.base=fast",
            (
                "--set learning_rate.base: is 'fast'",
                "a number",
                "write one without quotes or unit",
            ),
        ),
        (
            "resources={nodes: two}",
            ("--set resources: resources.nodes: is 'two'", "write one without quotes, point or unit"),
        ),
        (
            "learning_rate=0.10",
            ("--set learning_rate: is 0.10", "write learning_rate.base"),
        ),
        (
            "train.optimizer=adam",
            ("--set train.optimizer: is 'adam'", "write train.optimizer.name"),
        ),
        (
            "trackers=wandb",
            ("--set trackers: is 'wandb'", "write trackers.use"),
        ),
        (
            "trackers=[wandb]",
            ("--set trackers: is a list", "write trackers.use"),
        ),
        ("name=null", ("--set name: is missing", "write for example name: my-job")),
        ("name=#1", ("--set name: contains a comment and no value", "put double quotes around the value")),
        ("run_root=a #b", ("--set run_root: contains more than one value", "put double quotes around the value")),
        (
            "run_root=a: b",
            ("--set run_root: is a mapping or list without brackets", "write {...} or [...]", "quote the value"),
        ),
        (
            "environment.setup=- a",
            (
                "--set environment.setup: is a mapping or list without brackets",
                "write {...} or [...]",
                "quote the value",
            ),
        ),
        (
            "environment.env.A=@x",
            ("--set environment.env.A: is not valid YAML", "check indentation, quotes and brackets"),
        ),
        ("run_root=a\0b", ("--set run_root: contains a NUL character", "remove it")),
        ("train.seed=.inf", ("--set train.seed: is not a finite number", "write a number")),
        (
            "resources.gres=gpu:a100:2,nvme:1",
            ("expected a mapping",),
        ),
        ("resources.extra.reboot=true", ("goes under resources.sbatch, as in {reboot: ...}",)),
        ("train.epochs=", ("--set train.epochs: has no value", "write one, null to leave the field out")),
        ("environment.env.A= ", ("--set environment.env.A: has no value", '"" for an empty text')),
        ("command=1", ("--set command: is 1, expected the list of its words", "[python, train.py]")),
        ("micro_batch_size=4", ("--set micro_batch_size: is not a field", "did you mean batch.per_device_batch_size?")),
        (
            "batch.mirco_batch_size=4",
            ("--set batch.mirco_batch_size: is not a field", "did you mean batch.per_device_batch_size?"),
        ),
        # Another section has a field of the same name before it.
        ("train.optimizer.nmae=sgd", ("is not a field of train.optimizer", "did you mean train.optimizer.name?")),
        ("resources.gers.nvme=1", ("is not a field of resources", "did you mean resources.gres?")),
    ],
)
def test_a_bad_override_is_named_in_place_of_file_and_line(text: str, facts: tuple[str, ...], refuse: Refuse) -> None:
    (line,) = refuse(sets=(text,))
    assert_facts(line, *facts)
    assert "hunter2" not in line


def test_what_an_override_breaks_is_blamed_on_the_override(refuse: Refuse) -> None:
    (line,) = refuse(sets=("batch.global_batch_size=3", "resources.nodes=4"))
    assert_facts(
        line, "--set batch.global_batch_size: is 3", "the 4 ranks (4 x 1)", "write 4 or more", "at most 3 ranks"
    )


@pytest.mark.parametrize("text", ["4", "0.10", "1e3", "true", "007"])
def test_a_variable_of_the_environment_is_the_text_that_was_written(text: str) -> None:
    override = read_override(f"environment.env.THREADS={text}")
    assert isinstance(override, Override)
    assert override.value == text
