"""docs/life-of-a-run.md shows what the commands print today."""

from __future__ import annotations

import re
import shlex
import time
from pathlib import Path

import pytest

from hpcddp.cli import boundary
from hpcddp.cli.main import app
from hpcddp.slurm import commands
from hpcddp.slurm.job import State
from tests.manage.example import NOW, example

PAGE = (Path(__file__).parents[2] / "docs" / "life-of-a-run.md").read_text()
SHOWN = re.findall(r"^```\n\$ (hpcddp .*)\n((?:.*\n)*?)```$", PAGE, re.MULTILINE)


@pytest.fixture(autouse=True)
def _runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = example(tmp_path / "runs")
    monkeypatch.setattr(commands, "queue", lambda _: jobs)
    monkeypatch.setattr(commands, "priority", lambda *_: None)
    monkeypatch.setattr(commands, "cancel", lambda *_, **__: None)
    monkeypatch.setattr(time, "time", lambda: NOW)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("line", "text"), SHOWN, ids=[line for line, _ in SHOWN])
def test_what_is_shown_is_what_is_printed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str, text: str
) -> None:
    assert boundary.run(app, shlex.split(line)[1:]) == 0
    printed = capsys.readouterr()
    # A line of three dots stands for lines that the page leaves out.
    shown = "(?:.*\n)+".join(map(re.escape, text.split("...\n")))
    assert re.fullmatch(shown, printed.out.replace(str(tmp_path), "/home/you/project"))
    assert printed.err == ""


def test_every_command_is_shown() -> None:
    assert {line.split()[1] for line, _ in SHOWN} == {"status", "logs", "why", "cancel"}


def test_every_state_is_explained() -> None:
    rows = re.findall(r"^\| `([a-z ]+)` \|", PAGE.partition("| state | meaning |")[2], re.MULTILINE)
    assert rows == [str(state) for state in State]
