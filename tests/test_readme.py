"""README.md and docs/overview.md show what the commands print today."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import hpcddp

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
OVERVIEW = (ROOT / "docs" / "overview.md").read_text(encoding="utf-8")


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


def test_the_plan_is_what_plan_prints() -> None:
    (shown,) = (block for block in blocks(OVERVIEW, "") if block.startswith("$ hpcddp plan "))
    command, _, text = shown.partition("\n")
    assert printed_by(*command.split()[2:]).startswith(text)


BAD = """\
name: bad
resources:
  nodes: -1
  gpus: 4
  time_limit: "0"
batch:
  global_batch_size: 64
train:
  model: ResNet50
  dataset: cifar10
"""


def test_all_errors_of_a_job_file_are_reported_at_once(tmp_path: Path) -> None:
    (shown,) = (block for block in blocks(OVERVIEW, "") if block.startswith("$ hpcddp render bad.yaml\n"))
    (tmp_path / "bad.yaml").write_text(BAD, encoding="utf-8")
    done = hpcddp(tmp_path, "render", "bad.yaml", environment={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)})
    assert (done.returncode, done.stderr) == (2, shown.partition("\n")[2])


def test_the_script_is_what_render_prints() -> None:
    (shown,) = (block for block in blocks(OVERVIEW, "bash") if block.startswith("#!/bin/bash"))
    interpreter = "environment.python=/home/you/project/.venv/bin/python"
    printed = printed_by("render", "jobs/resnet50_imagenet.yaml", "--set", interpreter)
    assert re.sub("^defaults: .*$", "defaults: {version: ..., digest: ...}", printed, flags=re.MULTILINE) == shown


@pytest.mark.parametrize("page", ["README.md", "docs/overview.md"])
def test_every_link_leads_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)[^)]*\)", (ROOT / page).read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []
