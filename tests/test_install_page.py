"""The commands of docs/install.md are those of the command line, and its packages those of the project."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from hpcddp.cli.main import app
from hpcddp.doctor.install import Finding
from scripts.command_pages import all_commands

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "install.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BLOCKS = "".join(re.findall(r"^```(?:sh)?\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
COMMANDS = sorted(set(re.findall(r"^(?:\$ |uv run )?(hpcddp .*)$", BLOCKS, re.MULTILINE)))


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_of_the_page_exists_with_its_options(line: str) -> None:
    given = shlex.split(line.partition(" -- ")[0])[1:]
    known = {words: command for words, command in all_commands(app) if words}
    name = max((words for words in known if tuple(given[: len(words)]) == words), key=len)
    options = {option for parameter in known[name].params for option in parameter.opts}
    assert {word for word in given if word.startswith("--")} <= options


def test_the_page_installs_the_extra_and_names_its_packages_and_bounds() -> None:
    assert set(re.findall(r"hpcddp\[(\w+)\]", PAGE)) == {"train"}
    for requirement in PROJECT["optional-dependencies"]["train"]:
        name, bound = requirement.split(">=")
        assert name in PAGE
        assert name not in {"torch", "torchvision"} or f"{name} {bound}" in PAGE
    assert f"Python {PROJECT['requires-python'].removeprefix('>=')} or later" in PAGE


def test_the_shown_findings_have_the_form_of_the_command() -> None:
    (shown,) = re.findall(r"^\$ hpcddp doctor install\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for line in shown.splitlines():
        verdict, name, found = line[:8].strip(), line[9:21].strip(), line[22:]
        assert verdict == "ok"
        assert str(Finding(name=name, verdict="ok", found=found)) == line
