"""The commands and job files of docs/moving-over.md make a script, and what they replace exists."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.command_line import hpcddp

PAGE = (Path(__file__).parents[1] / "docs" / "moving-over.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [text.removeprefix("$ ").strip() for language, text in BLOCKS if language == "console"]
OURS = [command for command in COMMANDS if command.startswith("hpcddp ")]
PROGRAMS = [text for language, text in BLOCKS if language == "python"]
SCRIPTS = [text for language, text in BLOCKS if language == "bash"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a directory with the job files of the page, and the environment that they name."""
    for language, text in BLOCKS:
        if language == "yaml":
            (tmp_path / text.partition("\n")[0].removeprefix("# ")).write_text(text, encoding="utf-8")
    (tmp_path / "train.py").touch()
    return tmp_path


@pytest.mark.parametrize("command", OURS)
def test_the_command_makes_a_script(project: Path, command: str) -> None:
    words = ["render" if word == "submit" else word for word in shlex.split(command)[1:]]
    done = hpcddp(project, *words, environment={"PATH": "/usr/bin:/bin", "HOME": str(project)})
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --nodes=2\n" in done.stdout
    assert "#SBATCH --gres=gpu:4\n" in done.stdout
    assert "#SBATCH --time=12:00:00\n" in done.stdout


def test_every_section_shows_what_replaces_its_tool() -> None:
    sections = PAGE.split("\n## From ")[1:]
    assert len(sections) == 6
    assert [section.partition("\n")[0] for section in sections if "$ hpcddp submit" not in section] == []


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda text: text.partition("\n")[0].removeprefix("# "))
def test_the_program_uses_what_the_package_has(program: str) -> None:
    tree = ast.parse(program)
    (package,) = (node.names[0] for node in tree.body if isinstance(node, ast.Import))
    if importlib.util.find_spec(package.name) is None:
        pytest.skip(f"{package.name} is not installed")
    module = importlib.import_module(package.name)
    name = package.asname or package.name
    used = set(re.findall(rf"\b{name}\.([\w.]+)\(", program))
    assert used
    for path in used:
        found: object = module
        for part in path.split("."):
            found = getattr(found, part)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_script_that_is_replaced_is_one(script: str) -> None:
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=10)
