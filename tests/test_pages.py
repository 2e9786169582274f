"""Every hpcddp command on every page of the documentation is one that the command line knows."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcddp.cli import boundary
from hpcddp.cli.main import app

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "design").glob("*.md")))
BLOCK = re.compile(r"^```(sh|console|bash|)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def commands(page: Path) -> Iterator[str]:
    """Yield the commands of the page's blocks: lines of a shell, and lines after a prompt where output is shown."""
    for language, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        for line in text.replace("\\\n", " ").splitlines():
            shown = line if language in {"sh", "bash"} else line.removeprefix("$ ") if line.startswith("$ ") else ""
            if re.match(r'(eval "\$\()?hpcddp\b', shown):
                yield shown


def words_of(command: str) -> Iterator[list[str]]:
    """Yield the words of each call of hpcddp in a line, without those of the user's own program."""
    line = re.sub(r'^eval "\$\((.*?)\)"', r"\1", command)
    found: list[str] = []
    for word in (*shlex.shlex(line, posix=True, punctuation_chars=True), ";"):
        if not set(word) <= set(";|&<>"):
            found.append(word)
            continue
        if found[:1] == ["hpcddp"]:
            yield found[1 : found.index("--")] if "--" in found else found[1:]
        found = []


CALLS = [
    pytest.param(words, id=f"{page.name}: {' '.join(words)}")
    for page in PAGES
    for command in commands(page)
    for words in words_of(command)
]


@pytest.mark.parametrize("words", CALLS)
def test_the_command_line_knows_the_command_and_its_options(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    # An option that does not exist is found before --help is printed.
    code = boundary.run(app, [*words, "--help"])
    assert (code, capsys.readouterr().err) == (0, "")


def test_there_are_commands_on_the_pages() -> None:
    assert len(CALLS) > 60
