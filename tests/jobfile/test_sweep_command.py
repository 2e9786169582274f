"""Sweeps of a command: which words each element gets, and which placeholders are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.overrides import sweep_overrides
from hpcddp.jobfile.placeholders import argument_text
from hpcddp.jobfile.problems import JobFileError
from hpcddp.jobfile.read import load_job
from hpcddp.jobfile.sweep import element_spec, elements_of
from hpcddp.jobfile.write import dump_job, parse_resolved
from tests.facts import assert_facts
from tests.jobfile.conftest import Load, Refuse
from tests.messages import GoldenMessages

MINE = "name: mine\n"
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


def commands(spec: JobSpec) -> list[tuple[str, ...] | None]:
    """Return the command of each element, as its batch script reads the job."""
    read = parse_resolved(dump_job(spec, environment_values=False))
    return [element_spec(read, element).command for element in elements_of(read.sweep)]


def command_line(words: list[str], *axes: str) -> JobSpec:
    options = [*sweep_overrides(axes, None, None)]
    return load_job(None, overrides=[f"command={words}"], options=options).spec


def test_each_element_has_its_values_in_the_words_of_the_command() -> None:
    spec = command_line(["train.py", "--lr={lr}", "--seed", "{seed}"], "lr=0.1,0.2", "seed=0..1")
    assert commands(spec) == [
        ("train.py", f"--lr={lr}", "--seed", seed) for lr in ("0.1", "0.2") for seed in ("0", "1")
    ]


@pytest.mark.parametrize("command", ["1", "true", '["train.py", 2]'])
def test_a_command_that_is_no_list_of_words_is_refused(command: str) -> None:
    with pytest.raises(JobFileError, match="command"):
        load_job(None, overrides=[f"command={command}"])


def test_a_value_is_spelled_as_on_the_command_line() -> None:
    axis = 'v=0.10,1e-3,True,true,null,007,"a, b","1e-3 ",[1, 2],$HOME'
    values = ["0.10", "1e-3", "True", "true", "null", "007", "a, b", "1e-3 ", "[1, 2]", "$HOME"]
    assert commands(command_line(["echo", "{v}"], axis)) == [("echo", value) for value in values]


def test_a_number_that_the_command_spells_alike_stays_a_number() -> None:
    assert command_line(["echo", "{v}"], "v=0.1,1e-3,2").sweep == {"v": (0.1, "1e-3", 2)}


def test_a_cell_of_a_csv_is_spelled_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('lr,word\n1e-3,"a b"\n0.1,True\n')
    options = [*sweep_overrides([], tmp_path / "a.csv", None)]
    spec = load_job(None, overrides=['command=["x", "{lr}", "{word}"]'], options=options).spec
    assert commands(spec) == [("x", "1e-3", "a b"), ("x", "0.1", "True")]


def test_a_job_file_sweeps_its_command_beside_fields_and_variables(load: Load) -> None:
    more = (
        "command: [train.py, '{lr}', '{{lr}} ${lr}']\nbatch: {global_batch_size: 8}\n"
        "sweep: {lr: [0.1], batch.global_batch_size: [8, 16], environment.env.A: [x]}\n"
    )
    spec = load(more, good=MINE).spec
    assert commands(spec) == [("train.py", "0.1", "{0.1} ${lr}")] * 2
    elements = [element_spec(spec, element) for element in elements_of(spec.sweep)]
    assert [(one.batch.global_batch_size, one.environment.env["A"]) for one in elements] == [(8, "x"), (16, "x")]


@pytest.mark.parametrize("more", ["", "sweep: {environment.env.A: [x, y]}\n", "sweep: {learning_rate.base: [1.0]}\n"])
def test_a_command_with_braces_stays_as_it_is_without_a_sweep_of_it(more: str, load: Load) -> None:
    words = ("awk", "{print $1}", '{"a": {}}', "{lr}", "{{lr}}")
    batch = "batch: {global_batch_size: 8}\n" if "learning_rate" in more else ""
    spec = load(f"command: {list(words)}\n{batch}{more}", good=MINE).spec
    assert spec.command == words
    if more:
        assert set(commands(spec)) == {words}


@given(before=TEXT, value=TEXT, after=TEXT)
def test_a_value_arrives_byte_for_byte_as_a_part_of_one_word(before: str, value: str, after: str) -> None:
    spec = JobSpec.model_validate({"name": "a", "command": ["x", f"{before}:{{v}}{after}"], "sweep": [{"v": value}]})
    assert element_spec(spec, {"v": value}).command == ("x", f"{before}:{value}{after}")


@pytest.mark.parametrize(
    ("value", "text"),
    [("a b", "a b"), (0.5, "0.5"), (True, "true"), (None, "null"), ({"b": 1, "a": "é"}, '{"a": "é", "b": 1}')],
)
def test_a_value_that_is_no_string_is_json(value: Any, text: str) -> None:
    assert argument_text(value) == text


WRONG = {
    ("[t, '{lr}', '{sed}']", "{lr: [1], seed: [1]}"): (
        "4: sweep.seed: is neither a field",
        "did you mean sed?",
    ),
    ("[t, '{rl}']", "{lr: [1]}"): ("4: sweep.lr: is neither a field", "write {lr} in the command"),
    ("[t, '{lr}']", "{lr: [1], seed: [1]}"): ("4: sweep.seed: is neither a field", "write {seed} in the command"),
    ("[t, '{batch}']", "{batch: [1]}"): ("4: sweep.batch: is a field of the job file", "choose another name"),
    ("[t, '{lr}']", "[{lr: 1}, {learning_rate.base: 0.5}]"): (
        "4: sweep.lr: is missing in element 1",
        "give it in every element",
    ),
    ("[t, '{lr}']", "{lr: [1], command: [[x]]}"): ("4: sweep.lr: is a part of command", "keep one of them"),
    ("[t, '{lr}']", "{lr: [1, 2, 1]}"): ("4: sweep: holds the element lr=1 twice", "remove one"),
    (
        "['{lr}']",
        r'{lr: ["a\0b"]}',
    ): ("4: sweep: element 0", "'a\\x00b'", "a NUL character", "remove it"),
}


@pytest.mark.parametrize(("job", "facts"), WRONG.items(), ids=map(" ".join, WRONG))
def test_a_sweep_of_a_command_that_cannot_be_is_refused(
    job: tuple[str, str], facts: tuple[str, ...], refuse: Refuse
) -> None:
    command, sweep = job
    good = "name: mine\nbatch: {global_batch_size: 8}\n"
    line = refuse(f"command: {command}\nsweep: {sweep}\n", good=good)[0]
    assert_facts(line, f"job.yaml:{facts[0]}", *facts[1:])


def test_one_typing_error_is_one_line(refuse: Refuse) -> None:
    assert len(refuse("command: [t, '{sed}']\nsweep: {seed: [1]}\n", good=MINE)) == 1


def test_without_a_command_a_name_without_a_dot_is_a_field_as_before(refuse: Refuse) -> None:
    (line,) = refuse("sweep: {lr: [0.1]}\n")
    assert_facts(line, "job.yaml:4: sweep.lr: is not a field", "did you mean learning_rate.base?")


def test_an_element_that_continues_with_another_command_needs_its_placeholders(golden: GoldenMessages) -> None:
    spec = JobSpec.model_validate({"name": "a", "command": ["x", "--lr", "{lr}"]})
    assert element_spec(spec, {"lr": 0.1}).command == ("x", "--lr", "0.1")
    with pytest.raises(JobFileError) as caught:
        element_spec(spec, {"lr": 0.1, "seed": 0})
    assert_facts(
        golden.message(caught.value), "sweep.seed: is neither a field", "a placeholder", "write {seed} in the command"
    )
