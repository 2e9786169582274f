from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from hpcddp.jobfile.fields import Every
from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.problems import JobFileError
from hpcddp.jobfile.read import ResolvedJob
from hpcddp.jobfile.units import TimeLimit
from hpcddp.jobfile.write import dump_for_script, dump_job, parse_from_script, parse_resolved
from tests.facts import assert_facts
from tests.messages import GoldenMessages

Load = Callable[..., ResolvedJob]

TEXT = st.text(alphabet=st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), max_size=30)
LINE = TEXT.filter(lambda text: bool(text.strip()) and not set(text) & set("\r\n"))
NAME = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True).filter(
    lambda name: name not in {"_", "UID", "EUID", "PPID"} and not name.startswith("HPCDDP_")
)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT
VALUES = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=6
)
ARGUMENTS = st.dictionaries(TEXT.filter(lambda name: name != "num_classes"), VALUES, max_size=3)
SECONDS = st.integers(1, 2**31 - 1)


def job(
    resources: Mapping[str, Any], environment: Mapping[str, Any], arguments: Mapping[str, Any], every: Every
) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "a-job",
            "batch": {"global_batch_size": 8},
            "resources": resources,
            "environment": environment,
            "train": {"model": "a:b", "dataset": "digits", "model_args": arguments},
            "checkpoint": {"every": every},
            "requeue": {"signal_lead": None},
        }
    )


JOBS = st.builds(
    job,
    st.fixed_dictionaries(
        {
            "partition": st.none() | LINE,
            "constraint": st.none() | LINE,
            "time_limit": st.none() | st.builds(TimeLimit, st.none() | SECONDS),
            "sbatch": st.dictionaries(st.just("nice"), LINE | st.just(value=True)),
        }
    ),
    st.fixed_dictionaries(
        {
            "modules": st.lists(LINE, max_size=3),
            "setup": st.lists(TEXT, max_size=3),
            "env": st.dictionaries(NAME, TEXT, max_size=3),
        }
    ),
    ARGUMENTS,
    st.builds(lambda seconds: Every(duration=timedelta(seconds=seconds)), SECONDS)
    | st.builds(lambda steps: Every(steps=steps), st.integers(1))
    | st.builds(lambda epochs: Every(epochs=epochs), st.integers(1)),
)  # fmt: skip


@given(JOBS)
def test_a_job_reads_back_equal(spec: JobSpec) -> None:
    text = dump_job(spec, environment_values=True)
    again = parse_resolved(text)
    assert again == spec
    assert dump_job(again, environment_values=True) == text


@given(JOBS)
def test_the_job_of_a_script_reads_back_equal_but_for_the_values_of_the_environment(spec: JobSpec) -> None:
    again = parse_from_script(dump_for_script(spec))
    assert dump_job(again, environment_values=False) == dump_job(spec, environment_values=False)
    assert again.states_learning_rate == spec.states_learning_rate


@given(JOBS)
def test_the_text_means_the_same_to_another_reader_of_yaml(spec: JobSpec) -> None:
    text = dump_job(spec, environment_values=True)
    assert YAML(typ="safe", pure=True).load(text) == spec.model_dump(mode="json")


def test_without_environment_values_no_value_is_written(load: Load) -> None:
    spec = load("environment: {env: {TOKEN: hunter2}, pass_env: [SECRET]}\n").spec
    text = dump_job(spec, environment_values=False)
    assert "hunter2" not in text
    assert "  env: {}\n  pass_env: [SECRET]\n" in text
    assert parse_resolved(text).environment.env == {}


def test_a_script_holds_the_fields_that_differ_from_their_defaults(load: Load) -> None:
    spec = load("environment: {env: {TOKEN: hunter2}}\nrequeue: {signal_lead: null, max_failures: 0}\n").spec
    assert dump_for_script(spec).partition("\n")[2] == (
        "name: a-job\n"
        "batch:\n"
        "  global_batch_size: 8\n"
        "train:\n"
        "  model: resnet18\n"
        "  dataset: digits\n"
        "requeue:\n"
        "  signal_lead: null\n"
    )


def test_a_script_holds_the_default_learning_rate_where_a_command_states_it() -> None:
    spec = JobSpec.model_validate({"name": "a", "command": ["b"], "learning_rate": {"base": 0.1}})
    text = dump_for_script(spec)
    assert text.endswith("learning_rate:\n  base: 0.1\n")
    assert parse_from_script(text).states_learning_rate
    silent = JobSpec.model_validate({"name": "a", "command": ["b"]})
    assert "learning_rate" not in dump_for_script(silent)
    assert not parse_from_script(dump_for_script(silent)).states_learning_rate


def test_the_text_is_yaml_that_a_person_reads(load: Load) -> None:
    text = dump_job(load("resources: {nodes: 2, mem: 64G, partition: 'no'}\n").spec, environment_values=True)
    assert text.startswith("name: a-job\nrun_root: runs\nprofile: null\nresources:\n  nodes: 2\n")
    assert '  mem: "64G"\n' in text
    assert "  partition: no\n" in text
    assert 'checkpoint:\n  every: "10min"\n  keep: 3\n' in text


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        (
            "name: a\n",
            ("the resolved job: train: is missing", "train: {model: resnet18, dataset: digits}"),
        ),
        ("- a\n", ("the resolved job:1: is not a mapping", "write keys with values", "as in name: my-job")),
        ("name: a\nname: b\n", ("the resolved job:2: name: is a duplicate of line 1", "remove one of the two")),
    ],
)
def test_a_resolved_job_that_was_changed_is_refused(text: str, facts: tuple[str, ...], golden: GoldenMessages) -> None:
    with pytest.raises(JobFileError) as caught:
        parse_resolved(text)
    assert_facts(golden.message(caught.value), *facts)


def test_all_of_the_memory_reads_back_as_all_of_it(load: Load) -> None:
    spec = load("resources: {mem: 0, gres: {nvme: 1}, time_limit: 90}\n").spec
    assert parse_resolved(dump_job(spec, environment_values=True)) == spec
