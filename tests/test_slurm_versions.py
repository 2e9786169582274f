"""Tests that fail on some versions of Slurm are marked with a row of the page that says why."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.slurm_version import expected_failure

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "design" / "slurm-versions.md"


def fails(**words: str) -> pytest.Mark:
    return pytest.mark.fails_on_slurm(**words).mark


@pytest.mark.parametrize(
    ("version", "expected"),
    [("22.05.8", False), ("24.05.0", True), ("24.11.5-1", True), ("26.05.3", True), ("26.05.4", False)],
)
def test_a_marked_test_is_to_fail_from_the_first_version_to_the_one_before_the_last(
    version: str, *, expected: bool
) -> None:
    mark = expected_failure([fails(row="G", since="24.05", before="26.05.4")], version)
    assert (mark is not None) is expected
    if mark is not None:
        assert mark.kwargs == {"reason": "row G of docs/design/slurm-versions.md", "strict": True}


def test_without_an_end_it_is_to_fail_on_every_later_version() -> None:
    assert expected_failure([fails(row="P", since="25.11")], "99.05.1") is not None
    assert expected_failure([fails(row="P", since="25.11")], "25.05.9") is None


def test_the_first_mark_that_fits_counts() -> None:
    marks = [fails(row="P", since="25.11"), fails(row="B", since="24.05")]
    mark = expected_failure(marks, "24.11.5")
    assert mark is not None
    assert mark.kwargs["reason"].startswith("row B ")


def test_a_mark_without_a_row_is_an_error() -> None:
    with pytest.raises(TypeError):
        expected_failure([fails(since="25.11")], "22.05.8")


def test_every_row_that_a_mark_names_is_in_the_page() -> None:
    rows = re.findall(r"^\| (\w+) \| .*\d\d\.\d\d", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    marked = {
        row
        for path in (ROOT / "tests").rglob("test_*.py")
        if path != Path(__file__)
        for row in re.findall(r'fails_on_slurm\(row="(\w+)"', path.read_text(encoding="utf-8"))
    }
    assert marked - {*rows} == set()
