from __future__ import annotations

import pytest

from hpcddp.jobfile.document import DocumentError, read_document, read_value
from hpcddp.jobfile.problems import JobFileError
from tests.facts import assert_facts
from tests.messages import GoldenMessages


def test_every_key_path_knows_its_line() -> None:
    document = read_document("a: 1\n# a comment\nb:\n  c: [x,\n    y]\n  d: {e: 2}\n")
    assert document.value == {"a": 1, "b": {"c": ["x", "y"], "d": {"e": 2}}}
    assert document.source.lines == {
        ("a",): 1,
        ("b",): 3,
        ("b", "c"): 4,
        ("b", "c", "0"): 4,
        ("b", "c", "1"): 5,
        ("b", "d"): 6,
        ("b", "d", "e"): 6,
    }


def test_numbers_are_remembered_as_they_were_written() -> None:
    assert read_document("a: 010\nb: '010'\n").source.written == {("a",): "010"}


def test_block_scalars_and_quotes_are_texts() -> None:
    text = 'a: |\n  one\n  two\nb: >-\n  one\n  two\nc: "\\u00e9\\n"\n'
    assert read_document(text).value == {"a": "one\ntwo\n", "b": "one two", "c": "é\n"}


@pytest.mark.parametrize(
    ("text", "line", "facts"),
    [
        ("", None, ("is empty", "write at least name, batch.global_batch_size and train")),
        ("# nothing\n---\n", None, ("is empty", "write at least name, batch.global_batch_size and train")),
        ("- a\n", 1, ("is not a mapping at its top level", "write keys with values", "as in name: my-job")),
        ("a: 1\n---\nb: 2\n", 2, ("begins a second document", "write one job in one file")),
        (
            "%YAML 1.1\n---\na: on\n",
            1,
            ("requires another YAML version", "remove the %YAML line", "job files are YAML 1.2"),
        ),
        ("a:\n\tb: 1\n", 2, ("contains a tab", "replace the tab")),
        ("a: b: c\n", 1, ("has a ':'", "quote the value, or check the indentation")),
        (
            "a: 'x\n",
            1,
            ("is not valid YAML", "check indentation, quotes and brackets"),
        ),
        ("a: 1\n<<: {b: 2}\n", 2, ("contains a merge key (<<)", "write its keys out")),
        ("? [a]\n: 1\n", 1, ("has a key that is a list or a mapping", "write a text")),
        (
            "a: &x 1\nb: *x\n",
            2,
            ("is an alias (*)", "write the value out"),
        ),
        ("[" * 100_000, 1, ("is nested more than 20 levels deep", "write it flatter")),
        ('"\\ud800": 1\n', 1, ("has a key with a lone surrogate", "write the whole character")),
    ],
)
def test_what_is_no_job_file_is_refused(
    text: str, line: int | None, facts: tuple[str, ...], golden: GoldenMessages
) -> None:
    with pytest.raises(JobFileError) as caught:
        read_document(text)
    (problem,) = caught.value.problems
    assert problem.line == line
    assert_facts(golden.message(problem.sentence), *facts)


def test_a_bomb_of_aliases_is_refused_at_its_first_alias() -> None:
    bomb = "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n"
    with pytest.raises(JobFileError, match="is an alias"):
        read_document(bomb)


@pytest.mark.parametrize(
    ("text", "line", "facts"),
    [
        ("a: 1\nb: {c: 1}\na: 2\n", 3, ("is a duplicate of line 1", "remove one of the two")),
        ("a: &anchor 1\n", 1, ("has an anchor (&)", "remove it, or quote a string")),
        (
            "a: !!python/object:os.system 1\n",
            1,
            ("has a tag (!)", "remove it, or quote a string"),
        ),
        ("a: !!str 1\n", 1, ("has a tag (!)", "remove it, or quote a string")),
        ("a: .nan\n", 1, ("is not a finite number", "write a number")),
        ('a: "\\ud800"\n', 1, ("contains a lone surrogate (\\ud800 to \\udfff)", "write the character itself")),
    ],
)
def test_a_fault_of_one_key_leaves_the_others_standing(
    text: str, line: int, facts: tuple[str, ...], golden: GoldenMessages
) -> None:
    (fault,) = read_document(f"{text}z: last\n").faults
    assert (fault.path, fault.line) == (("a",), line)
    assert_facts(golden.message(fault.sentence), *facts)
    assert read_document(f"{text}z: last\n").value["z"] == "last"


def test_the_same_key_in_two_mappings_is_no_duplicate() -> None:
    assert read_document("a: {x: 1}\nb: {x: 1}\n").faults == ()


def test_a_value_for_set_is_a_scalar_or_a_flow_collection() -> None:
    assert read_value("[1, a]").value == [1, "a"]
    assert read_value("{a: 1e-3}").value == {"a": 0.001}
    assert read_value("").value is None
    with pytest.raises(DocumentError, match="has a tag"):
        read_value("!!int 3")
