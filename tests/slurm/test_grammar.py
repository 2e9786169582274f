from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hpcddp.script.directives import UnreadableLineError
from hpcddp.slurm.directives import UnwritableValueError, quote_value
from tests.facts import assert_facts
from tests.messages import GoldenMessages
from tests.slurm.directive_words import directive_words, words_of_line
from tests.slurm.measured_lines import MEASURED, MEASURED_SINCE_24_05

VALUES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r\0"))
SPECIAL = st.text(st.sampled_from(" \t\v\f\\\"'#$`;&|<>(){}[]*?!~%=,-:a"))


@pytest.mark.parametrize("escapes_blanks", [False, True])
@given(value=VALUES | SPECIAL)
@example(value="")
@example(value="--time=5")
@example(value='a"; touch /tmp/x #')
@example(value="ends with a backslash \\")
def test_a_quoted_value_is_read_back_unchanged(value: str, *, escapes_blanks: bool) -> None:
    line = f"#SBATCH --comment={quote_value(value)}"
    assert words_of_line(line, escapes_blanks=escapes_blanks) == [f"--comment={value}"]


@given(st.lists(VALUES | SPECIAL, max_size=5))
def test_values_on_one_line_stay_apart(values: list[str]) -> None:
    line = " ".join(f"--flag={quote_value(value)}" for value in values)
    assert words_of_line(f"#SBATCH {line}") == [f"--flag={value}" for value in values]


@pytest.mark.parametrize("value", ["gpu:a100:4", "2-00:00:00", "a,b", "%x-%j.out", "runs/r1/batch.log", "USR2@120"])
def test_ordinary_values_are_written_bare(value: str) -> None:
    assert quote_value(value) == value


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("a\nb", "a line break"),
        ("a\r", "a carriage return"),
        ("\0", "a NUL character"),
        ("\ud800", "half of a character (a lone surrogate)"),
    ],
)
def test_a_value_that_cannot_be_quoted_is_refused_with_its_field(value: str, name: str, golden: GoldenMessages) -> None:
    with pytest.raises(UnwritableValueError) as caught:
        quote_value(value, field="resources.account")
    assert_facts(golden.message(caught.value), f"resources.account is {value!r}", name, "remove it")


@pytest.mark.parametrize(("line", "words"), MEASURED)
def test_the_reader_returns_the_words_that_sbatch_read(line: str, words: list[str] | None) -> None:
    assert words_of_line(line) == words


@pytest.mark.parametrize(("line", "words"), MEASURED)
def test_our_reader_takes_from_a_line_what_a_newer_sbatch_takes(line: str, words: list[str] | None) -> None:
    assert words_of_line(line, escapes_blanks=True) == MEASURED_SINCE_24_05.get(line, words)


@pytest.mark.parametrize("line", ['#SBATCH --comment="a', "#SBATCH --comment='a", '#SBATCH --comment="a\\'])
def test_a_quote_that_does_not_close_is_refused(line: str) -> None:
    with pytest.raises(UnreadableLineError) as caught:
        words_of_line(line)
    assert str(caught.value) == f"the line {line!r} has a quote that does not close"


def test_the_first_line_that_is_no_comment_ends_the_reading() -> None:
    script = "#!/bin/bash\n#SBATCH --a=1\n\n \t\v\n   # a comment\n#SBATCH --b=2 --c\n : \n#SBATCH --d=3\n"
    assert directive_words(script) == ["--a=1", "--b=2", "--c"]


def test_a_unicode_line_separator_does_not_end_a_line() -> None:
    assert directive_words('#SBATCH --a="x\u2028y"\n#SBATCH --b=\x85\n') == ["--a=x\u2028y", "--b=\x85"]
