"""docs/troubleshooting.md answers each message in the same form."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
ENTRIES = re.findall(r"^### (.*)\n\n((?:(?!#).*\n)*)", PAGE, re.MULTILINE)


def test_the_commonest_messages_are_there() -> None:
    assert len(ENTRIES) >= 30
    assert len({message for message, _ in ENTRIES}) == len(ENTRIES)


@pytest.mark.parametrize(("message", "text"), ENTRIES, ids=[message[:40] for message, _ in ENTRIES])
def test_each_entry_has_cause_remedy_and_source(message: str, text: str) -> None:
    assert re.fullmatch(
        r"\*\*Cause\.\*\* (?:.|\n)+?\\\n\*\*Remedy\.\*\* (?:.|\n)+?\\\n\*\*Source\.\*\* \[.+\]\(https://.+\)\n+", text
    ), message


def test_every_field_that_is_named_exists() -> None:
    reference = (DOCS / "job-file.md").read_text(encoding="utf-8")
    fields = {
        f"{section}.{field}"
        for section, rows in re.findall(r"^## `([a-z.]+)`\n((?:(?!## ).*\n)*)", reference, re.MULTILINE)
        for field in re.findall(r"^\| `(\w+)` \|", rows, re.MULTILINE)
    }
    sections = {field.partition(".")[0] for field in fields}
    named = set(re.findall(rf"`((?:{'|'.join(sections)})\.\w+)[`:]", PAGE))
    assert len(named) > 10
    assert named <= fields
