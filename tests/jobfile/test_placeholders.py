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
BRACED = st.lists(st.sampled_from([*"{}$a", "{run_dir}", "{attempt}", "${run_id}"]), max_size=8).map("".join)


def words_of(*command: str) -> tuple[str, ...]:
    """Return the words that a task runs for a command, as its batch script reads the job."""
    spec = JobSpec.model_validate({"name": "a", "command": command})
    read = parse_resolved(dump_job(spec, environment_values=False))
    return fill_run_placeholders(read.command or (), VARIABLES)


def test_each_task_fills_in_its_run_and_attempt() -> None:
    words = words_of("train.py", "--out", "{run_dir}/ckpt.pt", "--name={run_id}-{attempt}", '{{"a": 1}}')
    assert words == ("train.py", "--out", "/runs/a {x}/r1/ckpt.pt", "--name=r1-2", '{"a": 1}')


@pytest.mark.parametrize(
    "words",
    [
        ("awk", "{print $1}"),
        ("t", '{"a": {"b": 1}}'),
        ("t", "{{lr}}", "{lr}"),
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


def test_a_doubled_brace_makes_the_name_of_a_placeholder_a_text() -> None:
    assert words_of("t", "{{run_dir}}", "${{run_id}}", "{{x}}") == ("t", "{run_dir}", "${run_id}", "{x}")


@given(before=TEXT | BRACED, after=TEXT | BRACED)
def test_doubled_braces_beside_a_placeholder_arrive_byte_for_byte(before: str, after: str) -> None:
    def doubled(text: str) -> str:
        return text.replace("{", "{{").replace("}", "}}")

    # A dollar before the brace would make it a variable of a shell.
    word = f"{doubled(before)}:{{run_id}}{doubled(after)}"
    assert words_of("t", word) == ("t", f"{before}:r1{after}")


@given(value=TEXT | BRACED)
def test_a_value_of_a_sweep_arrives_byte_for_byte_beside_a_placeholder_and_without_one(value: str) -> None:
    for command, expected in [
        (["t", "{v}", "{run_id}", "{{a}}"], ("t", value, "r1", "{a}")),
        (["t", "{v}", "{{a}}"], ("t", value, "{a}")),
    ]:
        spec = JobSpec.model_validate({"name": "a", "command": command, "sweep": [{"v": value}]})
        element = element_spec(spec, {"v": value})
        assert fill_run_placeholders(element.command or (), VARIABLES) == expected


REFUSED = {
    "[t, $HPCDDP_RUN_DIR/a]": ("holds '$HPCDDP_RUN_DIR/a'", "write {run_dir}", "bash -c"),
    "[t, '--out=${HPCDDP_RUN_ID}']": ("holds '--out=${HPCDDP_RUN_ID}'", "write {run_id}"),
    "[bash, script.sh, $HPCDDP_ATTEMPT]": ("holds '$HPCDDP_ATTEMPT'", "write {attempt}"),
    "[python, train.py, -c, $HPCDDP_RUN_DIR/a.yaml]": ("holds '$HPCDDP_RUN_DIR/a.yaml'", "write {run_dir}"),
    "[t, '{run_dir}', '{\"a\": 1}']": ("holds '{\"a\": 1}'", "write '{{\"a\": 1}}'"),
    "[t, '{run_dir} {x}']": ("holds '{run_dir} {x}'", "write '{run_dir} {{x}}'"),
    "[sh, -c, 'a {run_dir} ${run_dir}']": ("holds 'a {run_dir} ${run_dir}'", "write 'a {run_dir} ${{run_dir}}'"),
}


@pytest.mark.parametrize(("command", "facts"), REFUSED.items(), ids=REFUSED)
def test_a_command_that_no_task_could_fill_in_is_refused(command: str, facts: tuple[str, ...], refuse: Refuse) -> None:
    (line,) = refuse(f"command: {command}\n", good=MINE)
    assert_facts(line, "job.yaml:2: command:", *facts)


def test_the_advice_for_a_refused_command_is_accepted(load: Load) -> None:
    spec = load("command: [sh, -c, 'a {run_dir} ${{run_dir}}', '{{\"a\": 1}}']\n", good=MINE).spec
    assert words_of(*spec.command or ())[2] == "a /runs/a {x}/r1 ${run_dir}"


def test_a_placeholder_of_the_run_is_no_key_of_a_sweep(refuse: Refuse) -> None:
    (line,) = refuse("command: [t, '{run_dir}']\nsweep: {run_dir: [a, b]}\n", good=MINE)
    assert_facts(line, "sweep.run_dir: is filled in by each task", "choose another name")


def test_a_sweep_and_the_tasks_fill_in_one_command(load: Load, refuse: Refuse) -> None:
    more = "command: [t, '--lr={lr}', '{run_dir}/{lr}', '{{x}}']\nsweep: {lr: [0.1, 0.2]}\n"
    spec = load(more, good=MINE).spec
    element = element_spec(spec, {"lr": 0.2})
    assert fill_run_placeholders(element.command or (), VARIABLES) == ("t", "--lr=0.2", "/runs/a {x}/r1/0.2", "{x}")
    (line,) = refuse("command: [t, '{lr}', '{x} {run_dir}']\nsweep: {lr: [0.1, 0.2]}\n", good=MINE)
    assert_facts(line, "command: holds {x}", "write {{x}}")


def test_a_sweep_of_whole_commands_checks_each(refuse: Refuse) -> None:
    (line,) = refuse("command: [t]\nsweep: {command: [[t, '{run_dir}'], [t, '{run_dir} {']]}\n", good=MINE)
    assert_facts(line, "sweep.command: leads to an error in element 1", "'{run_dir} {{'")


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
