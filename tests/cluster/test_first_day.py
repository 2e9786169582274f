"""The commands of docs/first-day.md print what the page shows, one after the other, on a real Slurm."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.sandbox import Sandbox
from tests.cluster.sandboxes import QUICK, sandbox_with
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(
    r"^```(\w*)\n(.*?)^```$", (ROOT / "docs" / "first-day.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
)


def comparable(text: str) -> list[str]:
    """Return the lines without what differs between two runs: ids, numbers, hosts and the width of columns.

    PyTorch writes the name of the operation, `addmm`, before its message in some versions only.
    """
    lines = [line.replace("addmm: ", "") for line in text.splitlines() if line != "..."]
    varying = r"\d{8}-\d{6}-[0-9a-f]{4}|rank \d on n\d|\bn\d\b|\d+m\d+s|\d+ min\b|\d+ s\b|\d+s\b|\d[\d.]*"
    return [re.sub(r"-{2,}|\s+", " ", re.sub(varying, "0", line)).strip() for line in lines]


@pytest.fixture(scope="module")
def first_day() -> Iterator[Sandbox]:
    """Start the Slurm of the page, which has two nodes without GPUs."""
    with sandbox_with(*QUICK, options=("--nodes", "2", "--gpus-per-node", "0")) as started:
        yield started


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return a directory with the programs of the page, named in their first lines."""
    directory = tmp_path / "first-day"
    directory.mkdir()
    for language, text in BLOCKS:
        if language == "python":
            (directory / text.partition("\n")[0].removeprefix("# ")).write_text(text, encoding="utf-8")
    return directory


@pytest.fixture
def shell(first_day: Sandbox, directory: Path) -> Callable[[str], str]:
    """Return what runs a line in the directory and returns what it prints."""
    program = directory.parent / "bin" / "hpcddp"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m hpcddp "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    home = directory.parent
    homes = {"HOME": str(home), "XDG_CONFIG_HOME": f"{home}/.config", "XDG_STATE_HOME": f"{home}/.local/state"}
    more = {"PATH": path, "PYTHONPATH": str(ROOT), **homes}

    def run(line: str) -> str:
        done = first_day.run("bash", "-c", f"{line} 2>&1", cwd=directory, env=more, check=False, timeout=300)
        return done.stdout.replace(str(directory.parent), "/home/you")

    return run


@pytest.mark.depends_on("docs/first-day.md", "hpcddp/cli", "tests/cluster/test_first_day.py")
def test_the_commands_print_what_the_page_shows(shell: Callable[[str], str], directory: Path) -> None:
    commands = [text.removeprefix("$ ").partition("\n") for _, text in BLOCKS if text.startswith("$ ")]
    assert len(commands) > 10
    for command, _, shown in commands:
        if command == "hpcddp requeue last":
            wait_until(lambda: "starts after step 0" in shell("hpcddp logs"), lambda: shell("hpcddp why"), 240)
        printed = shell(command)
        if "starts after step 0" in shown:
            continue  # shown when the ranks have started, for which the next command waits
        found = comparable(printed)
        for line in comparable(shown):
            assert line in found, f"{line}\nis not in the output of {command}:\n{printed}"
            found = found[found.index(line) + 1 :]
    (job,) = (text for language, text in BLOCKS if language == "yaml")
    assert (directory / "job.yaml").read_text(encoding="utf-8").endswith(job)
