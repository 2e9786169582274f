"""The list of promises: each has a page, a place in the code that can be broken, and a test.

scripts/break-promises breaks them; these tests notice a promise whose code or test has another name now.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
PROMISES = tomllib.loads((PROJECT / "tests" / "promises.toml").read_text(encoding="utf-8"))["promise"]


def test_there_are_sixty() -> None:
    assert len({promise["says"] for promise in PROMISES}) >= 60


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise["says"])
def test_a_promise_stands_in_the_code_once_and_has_a_page_and_a_test(promise: dict[str, str]) -> None:
    assert (PROJECT / promise["page"]).is_file()
    assert (PROJECT / promise["file"]).read_text(encoding="utf-8").count(promise["old"]) == 1
    assert promise["new"] != promise["old"]
    file, _, name = promise["test"].partition("::")
    assert f"def {name.partition('[')[0]}(" in (PROJECT / file).read_text(encoding="utf-8")
