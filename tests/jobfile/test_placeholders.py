"""The placeholders that each task fills in: ``{run_dir}``, ``{run_id}`` and ``{attempt}`` in the words of a command."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.placeholders import fill_run_placeholders, shell_script, shell_text_index
from hpcddp.jobfile.sweep import element_spec
from hpcddp.jobfile.write import dump_job, parse_resolved
from tests.facts import assert_facts
from tests.jobfile.conftest import Load, Refuse

MINE = "name: mine\n"
VARIABLES = {"HPCDDP_RUN_DIR": "/runs/a {x}/r1", "HPCDDP_RUN_ID": "r1", "HPCDDP_ATTEMPT": "2"}
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


def words_of(*command: str) -> tuple[str, ...]:
    """Return the words that a task runs for a command, as its batch script reads the job."""
    spec = JobSpec.model_validate({"name": "a", "command": command})
    read = parse_resolved(dump_job(spec, environment_values=False))
    return fill_run_placeholders(read.command or (), VARIABLES)


def test_each_task_fills_in_its_run_and_attempt() -> None:
    words = words_of("train.py", "--out", "{run_dir}/ckpt.pt", "--name={run_id}-{attempt}", '{"a": 1}')
    assert words == ("train.py", "--out", "/runs/a {x}/r1/ckpt.pt", "--name=r1-2", '{"a": 1}')


@pytest.mark.parametrize(
    "words",
    [
        ("awk", "{print $1}"),
        ("t", '{"a": {"b": 1}}'),
        ("t", "{{lr}}", "{lr}", "{", "${run_id}"),
        ("sh", "-c", "echo ${x} ${run_dir} $HPCDDP_RUN_DIR ${HPCDDP_ATTEMPT}"),
        ("/bin/bash", "-euc", "echo $HPCDDP_RUN_ID"),
        ("env", "A=b", "bash", "-e", "-c", "echo $HPCDDP_RUN_ID"),
        ("bash", "-ce", "echo $HPCDDP_RUN_ID"),
        ("bash", "-o", "pipefail", "-c", "echo $HPCDDP_RUN_ID"),
        ("t", "$HPCDDP_ATTEMPT_DIR"),
    ],
)
def test_a_command_without_a_placeholder_of_the_run_does_not_change(words: tuple[str, ...], load: Load) -> None:
    assert load(f"command: {list(words)}\n", good=MINE).spec.command == words
    assert words_of(*words) == words


@given(before=TEXT, after=TEXT)
def test_what_stands_beside_a_placeholder_arrives_byte_for_byte(before: str, after: str) -> None:
    assert words_of("t", f"{before}:{{run_id}}{after}") == ("t", f"{before}:r1{after}")


@given(value=TEXT)
def test_a_value_of_a_sweep_arrives_byte_for_byte_beside_a_placeholder(value: str) -> None:
    spec = JobSpec.model_validate({"name": "a", "command": ["t", "{v}", "{run_id}", "{a}"], "sweep": [{"v": value}]})
    element = element_spec(spec, {"v": value})
    assert fill_run_placeholders(element.command or (), VARIABLES) == ("t", value, "r1", "{a}")


REFUSED = {
    "[t, $HPCDDP_RUN_DIR/a]": ("holds '$HPCDDP_RUN_DIR/a'", "write {run_dir}", "bash -c"),
    "[t, '--out=${HPCDDP_RUN_ID}']": ("holds '--out=${HPCDDP_RUN_ID}'", "write {run_id}"),
    "[bash, script.sh, $HPCDDP_ATTEMPT]": ("holds '$HPCDDP_ATTEMPT'", "write {attempt}"),
    "[python, train.py, -c, $HPCDDP_RUN_DIR/a.yaml]": ("holds '$HPCDDP_RUN_DIR/a.yaml'", "write {run_dir}"),
}


@pytest.mark.parametrize(("command", "facts"), REFUSED.items(), ids=REFUSED)
def test_a_command_that_no_task_could_fill_in_is_refused(command: str, facts: tuple[str, ...], refuse: Refuse) -> None:
    (line,) = refuse(f"command: {command}\n", good=MINE)
    assert_facts(line, "job.yaml:2: command:", *facts)


def test_a_placeholder_of_the_run_is_no_key_of_a_sweep(refuse: Refuse) -> None:
    (line,) = refuse("command: [t, '{run_dir}']\nsweep: {run_dir: [a, b]}\n", good=MINE)
    assert_facts(line, "sweep.run_dir: is filled in by each task", "choose another name")


def test_a_sweep_and_the_tasks_fill_in_one_command(load: Load) -> None:
    more = "command: [t, '--lr={lr}', '{run_dir}/{lr}', '{x} ${lr}']\nsweep: {lr: [0.1, 0.2]}\n"
    spec = load(more, good=MINE).spec
    element = element_spec(spec, {"lr": 0.2})
    words = fill_run_placeholders(element.command or (), VARIABLES)
    assert words == ("t", "--lr=0.2", "/runs/a {x}/r1/0.2", "{x} ${lr}")


def test_a_sweep_of_whole_commands_checks_each(refuse: Refuse) -> None:
    (line,) = refuse("command: [t]\nsweep: {command: [[t, '{run_dir}'], [t, $HPCDDP_RUN_ID]]}\n", good=MINE)
    assert_facts(line, 'sweep: element 1 with command=["t", "$HPCDDP_RUN_ID"]: command holds')


@pytest.mark.parametrize(
    ("words", "index"),
    [
        (("sh", "-c", "x"), 2),
        (("bash", "-ce", "x", "name", "-c"), 2),
        (("bash", "-lc", "x"), 2),
        (("bash", "-c", "-e", "x"), 3),
        (("bash", "-eo", "pipefail", "-c", "x"), 4),
        (("bash", "-co", "pipefail", "x"), 3),
        (("bash", "-O", "extglob", "+o", "posix", "-c", "x"), 6),
        (("bash", "--rcfile", "-c", "--norc", "-c", "--", "x"), 6),
        (("bash", "x", "-c", "y"), None),
        (("bash", "-o", "-c", "x"), None),
        (("bash", "-c"), None),
        (("bash",), None),
    ],
)
def test_the_text_of_a_shell_is_the_first_word_behind_its_options(words: tuple[str, ...], index: int | None) -> None:
    assert shell_text_index(words) == index


@pytest.mark.parametrize(
    ("words", "script"),
    [
        (("bash", "x", "-c", "y"), "x"),
        (("bash", "-eo", "pipefail", "x"), "x"),
        (("bash", "--rcfile", "y", "x"), "x"),
        (("bash", "-c", "x"), None),
        (("bash", "-e"), None),
    ],
)
def test_the_script_of_a_shell_is_the_first_word_behind_its_options(words: tuple[str, ...], script: str | None) -> None:
    assert shell_script(words) == script
