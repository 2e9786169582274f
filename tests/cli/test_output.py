"""Colours and line breaks of a terminal, and neither where there is none."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.manage.runs import make

COLOUR = re.compile("\x1b\\[[0-9;]*m")


def on_terminal(*words: str, cwd: Path, columns: int = 80, **environment: str) -> str:
    """Return what a terminal shows of a command."""
    terminal, slave = pty.openpty()
    variables = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns), "LINES": "24", **environment}
    variables = {name: value for name, value in variables.items() if value}
    process = subprocess.Popen(
        [sys.executable, "-m", "hpcddp", *words], cwd=cwd, env=variables, stdin=slave, stdout=slave, stderr=slave
    )
    os.close(slave)
    shown = b""
    # Linux ends the output of a terminal that nobody writes to any more with EIO.
    while True:
        try:
            shown += os.read(terminal, 4096)
        except OSError:
            break
    os.close(terminal)
    process.wait(timeout=60)
    return shown.decode().replace("\r\n", "\n")


def test_a_long_error_breaks_between_words_at_80_columns(tmp_path: Path) -> None:
    words = ("render", "--mail-type", "FAL", "--nodes", "x", "--", "true")
    shown = COLOUR.sub("", on_terminal(*words, cwd=tmp_path))
    assert max(map(len, shown.splitlines())) <= 80
    piped = subprocess.run(
        [sys.executable, "-m", "hpcddp", *words], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    ).stderr
    # The same words, of which none is broken.
    assert max(map(len, piped.splitlines())) > 80
    assert shown.split() == piped.split()


def test_a_path_that_is_longer_than_a_line_stays_whole(tmp_path: Path) -> None:
    path = f"{'d' * 90}/job.yaml"
    assert path in on_terminal("render", path, cwd=tmp_path)


COMMANDS = {
    "help": ("submit", "--help"),
    "an error": ("render", "none.yaml"),
    "a table": ("status",),
    "a log": ("logs",),
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    made = make(tmp_path / "runs").submitted("1", cluster="local").started("1").log(0, "hello\n")
    made.failed(0, message="a bug").ended("failed", reason="rank 0 failed", exit_code=70)
    return tmp_path


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_a_terminal_shows_colours_unless_they_are_unwanted(project: Path, words: tuple[str, ...]) -> None:
    coloured = on_terminal(*words, cwd=project, NO_COLOR="")
    assert COLOUR.search(coloured)
    plain = on_terminal(*words, cwd=project, NO_COLOR="1")
    assert "\x1b" not in plain
    assert COLOUR.sub("", coloured) == plain
    assert "\x1b" not in on_terminal(*words, cwd=project, TERM="dumb", NO_COLOR="")


def test_a_colour_in_a_log_is_shown_as_text(tmp_path: Path) -> None:
    made = make(tmp_path / "runs").submitted("1", cluster="local").started("1").log(0, "\x1b[31mred\n")
    made.ended("finished")
    assert "\\x1b[31mred" in on_terminal("logs", cwd=tmp_path)
