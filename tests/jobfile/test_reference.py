from __future__ import annotations

from pathlib import Path

from hpcddp.jobfile.job import field_paths, key_type_of
from hpcddp.jobfile.schema import job_reference

PAGE = Path(__file__).parents[2] / "docs" / "job-file.md"


def test_the_page_is_what_the_types_say_now() -> None:
    assert PAGE.read_text(encoding="utf-8") == job_reference(), "run scripts/generate-docs"


def test_the_page_has_a_row_for_every_field() -> None:
    page = job_reference()
    for path, field in field_paths():
        expected = f"## `{'.'.join(path)}`" if key_type_of(field).section else f"| `{path[-1]}` |"
        assert expected in page
