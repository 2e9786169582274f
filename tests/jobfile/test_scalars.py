from __future__ import annotations

import pytest

from hpcddp.jobfile.document import DocumentError, read_scalar
from tests.facts import assert_facts
from tests.messages import GoldenMessages


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("on", "on"),
        ("no", "no"),
        ("yes", "yes"),
        ("true", True),
        ("FALSE", False),
        ("tRue", "tRue"),
        ("null", None),
        ("~", None),
        ("", None),
        ("010", 10),
        ("0o10", 8),
        ("0x1F", 31),
        ("-7", -7),
        ("+7", 7),
        ("1e-3", 0.001),
        ("5.0e-5", 5e-5),
        (".5", 0.5),
        ("1.", 1.0),
        ("1_000", "1_000"),
        ("0b11", "0b11"),
        ("12:30:45", "12:30:45"),
        ("2001-01-01", "2001-01-01"),
        ("1.2.3", "1.2.3"),
        ("=", "="),
        ("٣", "٣"),
    ],
)
def test_an_unquoted_scalar_is_what_yaml_1_2_says(text: str, value: object) -> None:
    read = read_scalar(text)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        (".inf", ("is not a finite number", "write a number")),
        ("-.Inf", ("is not a finite number", "write a number")),
        (".nan", ("is not a finite number", "write a number")),
        ("1e999", ("is too large for a number", "quote it if it is a string")),
        ("9" * 5000, ("is a number of 5000 characters", "quote it if it is a string")),
    ],
)
def test_a_number_that_no_field_holds_is_refused(text: str, facts: tuple[str, ...], golden: GoldenMessages) -> None:
    with pytest.raises(DocumentError) as caught:
        read_scalar(text)
    assert_facts(golden.message(caught.value), *facts)
