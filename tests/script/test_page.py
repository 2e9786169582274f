"""What docs/any-script.md says that becomes of a script."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpcddp.jobfile.document import read_document
from hpcddp.script.convert import convert
from hpcddp.script.parse import parse_script

PAGE = (Path(__file__).parents[2] / "docs" / "any-script.md").read_text()
SECTION = PAGE.partition("\n## From an sbatch script\n")[2].partition("\n## ")[0]


def command_of(lines: str) -> list[str]:
    conversion = convert(parse_script(f"#!/bin/bash\n{lines}\n"), name="job", environment={})
    return list(conversion.job.spec.command or ())


def test_the_example_becomes_the_job_file_of_the_page() -> None:
    (script,) = re.findall(r"```bash\n(.*?)```", SECTION, re.DOTALL)
    (job,) = re.findall(r"```yaml\n(.*?)```", SECTION, re.DOTALL)
    assert convert(parse_script(script), name="translate", environment={}).text == job


ROWS = re.findall(r"^\| (`.*srun.*`) \| `(\[.*\])` \|$", SECTION, re.MULTILINE)


@pytest.mark.parametrize(("script", "command"), ROWS)
def test_the_commands_of_the_page_are_what_the_scripts_become(script: str, command: str) -> None:
    lines = "\n".join(re.findall("`([^`]*)`", script))
    assert read_document(f"command: {command}").value["command"] == command_of(lines)


def test_the_page_has_such_rows() -> None:
    assert len(ROWS) == 3
