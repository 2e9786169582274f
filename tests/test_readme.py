"""The README shows what the commands print today."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [text for found, text in fences if found == language]


def hpcddp(*words: str) -> str:
    command = [sys.executable, "-m", "hpcddp", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout


def test_the_job_file_is_the_quickstarts() -> None:
    assert blocks("yaml") == [(ROOT / "jobs" / "quickstart.yaml").read_text()]


def test_the_plan_is_what_plan_prints() -> None:
    (shown,) = (block for block in blocks("") if block.startswith("$ hpcddp plan "))
    command, _, text = shown.partition("\n")
    assert hpcddp(*command.split()[2:]).startswith(text)


def test_the_script_is_what_render_prints() -> None:
    (shown,) = (block for block in blocks("bash") if block.startswith("#!/bin/bash"))
    printed = hpcddp(
        "render", "jobs/resnet50_imagenet.yaml", "--set", "environment.python=/home/you/project/.venv/bin/python"
    )
    before, _, after = shown.partition("  # ... the resolved job, without the values of environment.env ...\n")
    assert printed.startswith(before)
    assert printed.endswith(after)


def test_every_link_of_the_readme_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
