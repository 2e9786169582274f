"""docs/profiles.md shows what its commands print today, on a cluster that tests/slurm/answers.py describes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.command_line import hpcddp
from tests.slurm.answers import NEW

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "profiles.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [text for language, text in BLOCKS if not language and text.startswith("$ ")]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the home of a user on the page's cluster; the page's commands run in it one after the other."""
    folder = tmp_path_factory.mktemp("page")
    programs = folder / "bin"
    programs.mkdir()
    for name in ("config", "partitions", "nodes", "associations"):
        (programs / name).write_text(getattr(NEW, name), encoding="utf-8")
    bodies = {
        "scontrol": f"case $* in *config) cat {programs}/config;; *partition) cat {programs}/partitions;; esac",
        "sinfo": f"cat {programs}/nodes",
        "sacctmgr": f"[[ $5 == assoc ]] && cat {programs}/associations || echo {NEW.default_account}",
        "sbatch": "echo nothing is to be submitted >&2; exit 1",
        "srun": "exit 1",
    }
    for name, body in bodies.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o700)
    (folder / "slurm.conf").touch()
    return folder


def files_before(block: str) -> list[tuple[str, str]]:
    """Return the files that the page shows before a command, named in their first lines."""
    shown = BLOCKS[: BLOCKS.index(("", block))]
    return [(text.partition("\n")[0].removeprefix("# "), text) for language, text in shown if language == "yaml"]


@pytest.mark.parametrize("block", COMMANDS, ids=lambda block: block.partition("\n")[0])
def test_the_command_prints_what_the_page_shows(home: Path, block: str) -> None:
    for name, text in files_before(block):
        (home / name).write_text(text, encoding="utf-8")
    command, _, shown = block.partition("\n")
    words = shlex.split(command.removeprefix("$ hpcddp "))
    environment = {"PATH": f"{home / 'bin'}:/usr/bin:/bin", "HOME": str(home), "SLURM_CONF": "slurm.conf"}
    found = hpcddp(home, *words, environment=environment)
    rest = (found.stdout + found.stderr).replace(str(home), "/home/ada")
    for excerpt in filter(None, shown.split("...\n")):
        assert excerpt in rest
        rest = rest.partition(excerpt)[2]


def test_the_page_shows_commands() -> None:
    assert len(COMMANDS) >= 5
