"""Sweeps in a job file: their elements, and what is wrong with them."""

from __future__ import annotations

import json
from contextlib import suppress
from itertools import product
from typing import Any

import pytest

from hpcddp.jobfile.fields import expand_ranges
from hpcddp.jobfile.problems import JobFileError
from hpcddp.jobfile.sweep import (
    assignment,
    count_elements,
    element_spec,
    elements_of,
    refuse_key,
)
from hpcddp.jobfile.write import dump_job, parse_resolved
from tests.facts import assert_facts
from tests.jobfile.conftest import Load, Refuse
from tests.messages import GoldenMessages

WRONG = {
    "sweep: 5": ("sweep: is 5", "write for example {train.seed: [0, 1, 2]}"),
    "sweep: {}": ("sweep: contains no element", "write for example {train.seed: [0, 1, 2]}"),
    "sweep: []": ("sweep: contains no element", "write for example {train.seed: [0, 1, 2]}"),
    "sweep: [{train.seed: 0}, {}]": (
        "sweep: has no value in element 1",
        "write for example {train.seed: 0}",
    ),
    "sweep: {train.seed: []}": (
        "sweep.train.seed: lists no value",
        "write for example [0, 1, 2]",
        "leave the key out",
    ),
    "sweep: {train.seed: [1, 2, 1]}": ("sweep: holds the element train.seed=1 twice", "remove one"),
    "sweep: [{train.seed: 1}, {train.seed: 1}]": ("sweep: holds the element train.seed=1 twice", "remove one"),
    "sweep: {train.seed: 0..100000}": (
        "sweep.train.seed: holds 0..100000",
        "at most 100000 integers",
        "write one, as in 0..4",
    ),
    "sweep: {train.seed: 4..0}": ("sweep.train.seed: holds 4..0", "the smallest one first", "as in 0..4"),
    "sweep: {learning_rate.base: 1e-5..1e-3}": (
        "sweep.learning_rate.base: holds 1e-5..1e-3",
        "or the values, as in 0.1,0.2,0.4",
    ),
    "sweep: {train.seed: 0..9999, train.epochs: 1..11}": (
        "sweep: has 110000 elements",
        "at most 100000",
        "split it into several sweeps",
    ),
    "sweep: {train.sed: [1]}": ("sweep.train.sed: is not a field of train", "did you mean train.seed?"),
    "sweep: {train..seed: [1]}": ("sweep.train..seed: is not a key path", "write for example train.seed"),
    "sweep: {resources.nodes: [1, 2]}": (
        "sweep.resources.nodes: cannot be swept",
        "ask Slurm for the same",
        "submit once for each value, with --set",
    ),
    "sweep: {requeue.causes: [[], [preemption]]}": (
        "sweep.requeue.causes: cannot be swept",
        "ask Slurm for the same",
        "submit once for each value, with --set",
    ),
    "sweep: {environment.setup: [a, b]}": ("sweep.environment.setup: cannot be swept", "sweep environment.env.NAME"),
    "sweep: {environment.env: [{A: x}]}": ("sweep.environment.env: cannot be swept", "sweep environment.env.NAME"),
    "sweep: {name: [a, b]}": ("sweep.name: cannot be swept", "the same for all elements", "leave it out"),
    "sweep: {profile: [a, b]}": ("sweep.profile: cannot be swept", "submit once for each value, with --set"),
    "sweep: {train.optimizer: [{name: sgd}], train.optimizer.name: [sgd]}": (
        "sweep.train.optimizer.name: is a part of train.optimizer",
        "keep one of them",
    ),
    "sweep: [{environment.env.A: x}, {train.seed: 1}]": (
        "sweep.environment.env.A: is missing in element 1",
        "in every element",
    ),
    "sweep: {train.seed: [0, -1]}": (
        "sweep: element 1 with train.seed=-1: train.seed is -1",
        "at least 0",
        "write 0 or more",
    ),
    "sweep: {train.model: [resnet18, resnet19]}": (
        "sweep: element 1",
        "train.model is 'resnet19'",
        "did you mean resnet18?",
        "pkg.module:function",
    ),
    "sweep: {environment.env.A: [1]}": (
        "sweep: element 0 with environment.env.A:",
        "environment.env.A contains a value that is not shown",
        "put double quotes around it",
    ),
    "sweep: {learning_rate.schedule: [cosine], learning_rate.min: [0.05, 0.3], train.seed: [0, 1]}": (
        'sweep: element 2 with learning_rate.schedule="cosine", learning_rate.min=0.3, train.seed=0:',
        "learning_rate.min is 0.3",
        "learning_rate.base 0.1",
        "write less than that",
    ),
    "sweep: {environment.env.RANDOM: [x]}": (
        "sweep: element 0 with environment.env.RANDOM:",
        "names RANDOM, which bash reserves",
        "remove it",
    ),
    "max_parallel: 4": ("max_parallel: is 4", "write one, or remove it"),
}


@pytest.mark.parametrize(("more", "facts"), WRONG.items(), ids=WRONG)
def test_a_sweep_that_cannot_be_is_refused_in_one_sentence(more: str, facts: tuple[str, ...], refuse: Refuse) -> None:
    (line,) = refuse(f"{more}\n")
    assert_facts(line, f"job.yaml:4: {facts[0]}", *facts[1:])


def test_a_rule_looks_at_the_swept_values_and_not_at_the_jobs_own(load: Load) -> None:
    more = "learning_rate: {schedule: cosine, min: 0.3}\nsweep: {learning_rate.base: [0.4, 0.5]}\n"
    assert len(elements_of(load(more).spec.sweep)) == 2


SWEPT = {
    "learning_rate: {schedule: cosine}\n": {"learning_rate.base": [0.1, 0.4], "learning_rate.min": [0.0, 0.3, "x"]},
    "resources: {tasks_per_node: 2}\n": {
        "batch.global_batch_size": [1, 8],
        "batch.per_device_batch_size": [None, 3, 4],
    },
    "": {"train.optimizer.name": ["sgd", "adamw"], "train.optimizer": [{"name": "sgd", "betas": [0.5, 0.6]}]},
    "environment: {pass_env: [A]}\n": {"environment.env.A": ["x"], "train.seed": [0, 1]},
    "trackers: {use: [tensorboard]}\n": {"train.label_smoothing": [0.0, 0.1], "train.loss": [None, "m:f"]},
}


@pytest.mark.parametrize(("more", "sweep"), SWEPT.items())
def test_a_sweep_is_refused_where_the_job_of_an_element_would_be(
    more: str, sweep: dict[str, list[Any]], load: Load
) -> None:
    for values in product(*sweep.values()):
        element = dict(zip(sweep, values, strict=True))
        alone = tuple(f"{key}={json.dumps(value)}" for key, value in element.items())
        as_sweep = (f"sweep={json.dumps([element])}",)
        with suppress(JobFileError):
            assert element_spec(load(more).spec, element) == load(more, sets=alone).spec
        assert refused(load, more, as_sweep) == refused(load, more, alone)


def refused(load: Load, more: str, sets: tuple[str, ...]) -> bool:
    try:
        load(more, sets=sets)
    except JobFileError:
        return True
    return False


def test_of_the_errors_of_elements_the_first_is_told(refuse: Refuse) -> None:
    rate = "learning_rate.schedule: [cosine, step], learning_rate.milestones: [[]]"
    (line,) = refuse(f"sweep: {{train.seed: [0, 1, 2, 3], {rate}}}\n")
    assert_facts(line, "job.yaml:4: sweep: element 1 with train.seed=0")
    assert_facts(line, 'learning_rate.schedule="step", learning_rate.milestones=[]:')
    assert_facts(line, "learning_rate.milestones is empty", "write the epochs", "[30, 60, 80]")


def test_an_error_of_the_job_that_all_elements_have_is_reported_at_its_own_key(refuse: Refuse) -> None:
    more = "learning_rate: {gamma: 0.5}\nsweep: {train.seed: 0..9}\n"
    (line,) = refuse(more)
    assert_facts(line, "job.yaml:4: learning_rate.gamma: is given", "constant", "write schedule: step")


def test_the_resolved_job_of_a_sweep_is_read_without_a_check_of_its_elements(
    load: Load, golden: GoldenMessages
) -> None:
    text = dump_job(load("sweep: {train.seed: [0, 1]}\n").spec, environment_values=False)
    spec = parse_resolved(text.replace("[0, 1]", "[0, -1]"))
    with pytest.raises(JobFileError) as caught:
        element_spec(spec, {"train.seed": -1})
    message = golden.message(caught.value)
    assert_facts(message, "the job with train.seed=-1: train.seed: is -1", "at least 0", "write 0 or more")


def test_a_grid_varies_its_last_key_fastest(load: Load) -> None:
    elements = elements_of(load("sweep: {learning_rate.base: [0.1, 0.2], train.seed: 0..2}\n").spec.sweep)
    assert [list(element.values()) for element in elements] == [
        [0.1, 0], [0.1, 1], [0.1, 2], [0.2, 0], [0.2, 1], [0.2, 2],
    ]  # fmt: skip


def test_a_list_gives_each_element_what_it_says_and_no_more(load: Load) -> None:
    spec = load("sweep:\n- {train.seed: 7}\n- {learning_rate.base: 0.5, train.seed: 8}\n").spec
    assert elements_of(spec.sweep) == ({"train.seed": 7}, {"train.seed": 8, "learning_rate.base": 0.5})
    elements = [element_spec(spec, values) for values in elements_of(spec.sweep)]
    assert [(element.learning_rate.base, element.train.seed if element.train else None) for element in elements] == [
        (0.1, 7), (0.5, 8),
    ]  # fmt: skip


def test_a_range_is_inclusive_and_may_be_negative() -> None:
    assert list(expand_ranges(["-1..1", 5, "a..b", "3..2"])) == [-1, 0, 1, 5, "a..b", "3..2"]


def test_the_elements_of_a_grid_are_counted_without_making_them() -> None:
    assert count_elements({"a": tuple(range(1000)), "b": tuple(range(1000))}) == 1_000_000


def test_an_element_is_the_job_with_its_values_and_without_the_sweep(load: Load) -> None:
    more = "checkpoint: {every: 5min}\nsweep: {checkpoint.every: [90s, {steps: 5}], train.model_args.width: [3]}\n"
    spec = load(more, good="name: a\nbatch: {global_batch_size: 8}\ntrain: {model: 'm:f', dataset: digits}\n").spec
    element = element_spec(spec, {"checkpoint.every": {"steps": 5}, "train.model_args.width": 3, "train.seed": 2})
    assert element == parse_resolved(dump_job(element, environment_values=True))
    assert (element.sweep, element.checkpoint.every.steps, element.train) == (
        None, 5, spec.train and spec.train.model_copy(update={"seed": 2, "model_args": {"width": 3}}),
    )  # fmt: skip


def test_an_element_may_run_another_command(load: Load) -> None:
    spec = load("sweep: {command: [[python, a.py], [python, b.py]]}\n", good="name: a\nbatch: {global_batch_size: 8}\n")
    assert element_spec(spec.spec, elements_of(spec.spec.sweep)[1]).command == ("python", "b.py")


def test_a_resolved_sweep_reads_back_equal(load: Load) -> None:
    for more in ("sweep: {train.seed: 0..3, learning_rate.base: [0.1]}", "sweep: [{train.seed: 1}, {train.seed: 2}]"):
        spec = load(f"{more}\nmax_parallel: 2\n").spec
        assert parse_resolved(dump_job(spec, environment_values=False)) == spec


def test_set_takes_a_sweep_away(load: Load) -> None:
    assert load("sweep: {train.seed: [0, 1]}\n", sets=("sweep=null",)).spec.sweep is None


def test_every_field_can_be_swept_or_says_why_not() -> None:
    swept = {"train.seed", "batch.global_batch_size", "launch.hang_timeout", "command", "entrypoint"}
    assert {key for key in swept if refuse_key(key) is None} == swept
    assert refuse_key("environment.env.LR") is None
    for key in ("resources.sbatch.hold", "environment.pass_env", "requeue", "max_parallel", "sweep", "run_root"):
        assert "cannot be swept: " in str(refuse_key(key))


def test_values_in_place_leave_the_rest_as_it_is(load: Load) -> None:
    spec = load("environment: {env: {A: x}}\n").spec
    changed = element_spec(spec, {"environment.env.B": "0.1", "learning_rate.base": 0.5})
    assert dict(changed.environment.env) == {"A": "x", "B": "0.1"}
    assert changed.model_copy(update={"environment": spec.environment, "learning_rate": spec.learning_rate}) == spec


def test_values_of_a_mapping_are_set_inside_it(load: Load) -> None:
    spec = load(good="name: a\nbatch: {global_batch_size: 8}\ntrain: {model: 'm:f', dataset: digits}\n").spec
    train = element_spec(spec, {"train.model_args.a.b": 1}).train
    assert train is not None
    assert train.model_args == {"a": {"b": 1}}


def test_an_assignment_is_one_line() -> None:
    assert assignment({"a.b": [1, "x"], "c": None}) == f"a.b={json.dumps([1, 'x'])}, c=null"
