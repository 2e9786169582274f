"""docs/questions.md shows what its commands print today."""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "questions.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [text for language, text in BLOCKS if not language and text.startswith("$ ")]
PROGRAMS = {"hpcddp": ["-P", "-m", "hpcddp"], "python": ["-P"]}
pytestmark = pytest.mark.depends_on("docs/questions.md", "hpcddp/doctor", "hpcddp/batch", "tests/test_questions.py")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write every file of the page, named in its first line."""
    folder = tmp_path_factory.mktemp("questions")
    for language, text in BLOCKS:
        if language:
            (folder / text.partition("\n")[0].removeprefix("# ")).write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("block", COMMANDS, ids=lambda block: block.partition("\n")[0])
def test_the_command_prints_what_the_page_shows(files: Path, block: str) -> None:
    command, _, shown = block.partition("\n")
    program, *words = shlex.split(command.removeprefix("$ "))
    found = subprocess.run(
        [sys.executable, *PROGRAMS[program], *words],
        cwd=files,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.stderr == ""
    rest = found.stdout
    for excerpt in filter(None, shown.split("...\n")):
        assert excerpt in rest
        rest = rest.partition(excerpt)[2]


def test_every_test_that_the_page_names_exists() -> None:
    named = re.findall(r"`pytest ([^`]+)`", PAGE)
    paths = [word for word in itertools.chain(*map(str.split, named)) if "/" in word]
    assert len(paths) > 5
    assert [path for path in paths if not (ROOT / path).exists()] == []
