"""The blocks of every page: hpcddp knows the commands and the job files, bash and Python the scripts."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from hpcddp.cli import boundary
from hpcddp.cli.main import app
from hpcddp.jobfile.read import DefaultSettings, load_job

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


BLOCKS = [
    pytest.param(language, text, id=f"{page.name} {number}")
    for page in PAGES
    for number, (language, text) in enumerate(
        re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    )
]
JOB: dict[str, Any] = {
    "name": "page",
    "batch": {"global_batch_size": 256},
    "train": {"model": "resnet18", "dataset": "digits"},
}


@pytest.mark.parametrize(("language", "text"), BLOCKS)
def test_the_block_is_what_its_language_says(language: str, text: str) -> None:
    if language == "python":
        compile(text, "block", "exec")
    elif language in {"sh", "bash"}:
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")
    elif language == "yaml" and "hydra:" not in text:
        # Many blocks show a section alone.
        job = YAML(typ="safe").load(text)
        if not {"name", "command", "entrypoint"} & set(job):
            job = {**JOB, **job, "train": {**JOB["train"], **job.get("train", {})}}
        # A profile that the page names is a file of its reader.
        job = {key: value for key, value in job.items() if key != "profile"}
        load_job(job, defaults=DefaultSettings(environment={"SCRATCH": "/scratch"}))
