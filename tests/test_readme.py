"""README.md shows what the commands print today."""

import re
import subprocess
import sys
from pathlib import Path

from tests.command_line import hpcddp

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [text for found, text in fences if found == language]


def printed_by(*words: str) -> str:
    return hpcddp(ROOT, *words).stdout


def test_the_readme_can_be_read_at_once() -> None:
    assert README.count("\n") <= 150


def test_two_commands_set_everything_up() -> None:
    commands = [line.split()[0] for line in blocks(README, "sh")[0].splitlines()]
    assert commands == ["scripts/quickstart", "scripts/test"]
    assert all((ROOT / command).exists() for command in commands)
    assert all(block.startswith("# needs: ") for block in blocks(README, "sh")[1:])


def test_the_job_file_is_the_quickstarts() -> None:
    assert blocks(README, "yaml") == [(ROOT / "jobs" / "quickstart.yaml").read_text(encoding="utf-8")]


def test_the_command_of_the_readme_makes_a_script() -> None:
    command = blocks(README, "sh")[1].splitlines()[1].replace("hpcddp submit", "render")
    assert "#SBATCH --gres=gpu:4\n" in printed_by(*command.split())


def test_the_picture_shows_the_tutorial() -> None:
    command = [sys.executable, "scripts/draw-picture", "--check"]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=60)


def test_every_link_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^)#:]+)[^)]*\)", README)
    assert links
    assert [link for link in links if not ROOT.joinpath(link).exists()] == []
