"""Runs as a table, and one run in detail."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcddp.manage.format import duration_text, ranks_text, used_text
from hpcddp.manage.overview import Line, overview
from hpcddp.manage.overview_text import details, table
from hpcddp.manage.status import RunStatus
from hpcddp.slurm.job import State
from tests.manage.runs import NOON, make, queued

TABLE = """\
run           job  name    state     attempt     step    loss  samples/s    eta  nodes  time
a-run         1    digits  finished        0  400/400  0.0025         64      -      1  6m49s
another       2    digits  running         0   40/400   0.025         64  6m00s      2  50s of 2h
one-more-run  3    digits  pending         -    -/400       -          -      -      4  0s of 2h"""


def plain(text: str, _: State) -> str:
    return text


@pytest.fixture
def lines(tmp_path: Path) -> list[Line]:
    make(tmp_path, "a-run").submitted("1").started("1").event("train").steps(1, 400).ended("finished", steps=400)
    make(tmp_path, "another").submitted("2").started("2").event("train").steps(1, 40)
    make(tmp_path, "one-more-run").submitted("3")
    jobs = [queued("2", used_s=50, limit_s=7200, nodes=2), queued("3", "PENDING", limit_s=7200, nodes=4)]
    found = overview(tmp_path, ask=lambda: jobs, now=NOON + 59, everything=True).lines
    return sorted(found, key=lambda line: line.run.run_id if isinstance(line, RunStatus) else "")


def test_the_table_lines_up(lines: list[Line]) -> None:
    assert table(lines, width=None, paint=plain) == TABLE.splitlines()


@pytest.mark.parametrize("width", [80, 60, 45])
def test_a_narrow_terminal_goes_without_columns_and_says_which(lines: list[Line], width: int) -> None:
    *rows, note = table(lines, width=width, paint=plain)
    assert all(len(row) <= width for row in rows)
    assert note.startswith("(columns hidden: ")
    assert "state" in rows[0]
    assert "step" in rows[0]


def test_a_terminal_of_80_columns_shows_job_id_attempt_loss_and_speed_of_runs_with_usual_ids(tmp_path: Path) -> None:
    ids = ("20261121-101500-3fa2", "20261122-111500-d09c", "20261122-111501-d09c")
    for number, run_id in enumerate(ids):
        made = make(tmp_path, run_id, "resnet50-a100").submitted(str(71234 + number)).started(str(71234 + number))
        made.event("train").steps(1, 40)
    jobs = [queued(str(71234 + number), used_s=50, limit_s=7200, nodes=2) for number in range(3)]
    found = overview(tmp_path, ask=lambda: jobs, now=NOON + 59, everything=True).lines
    found = tuple(sorted(found, key=lambda line: line.run.run_id if isinstance(line, RunStatus) else ""))
    header, *rows = table(found[:2], width=80, paint=plain)
    assert header.split() == ["run", "job", "name", "state", "attempt", "step", "loss", "samples/s"]
    assert sorted(row.split()[:2] for row in rows[:2]) == [["3fa2", "71234"], ["d09c", "71235"]]
    # Two runs with the same letters keep their whole ids.
    rows = table(found, width=80, paint=plain)[1:4]
    assert sorted(row.split()[0] for row in rows) == ["20261122-111500-d09c", "20261122-111501-d09c", "3fa2"]


def test_only_the_state_has_its_colour(lines: list[Line]) -> None:
    painted = table(lines, width=None, paint=lambda text, state: f"<{state}:{text}>")
    assert "<running:running >" in painted[2]
    assert painted[2].count("<") == 1
    assert "<" not in painted[0]


def test_one_run_is_shown_fact_by_fact(lines: list[Line]) -> None:
    running = lines[1]
    assert isinstance(running, RunStatus)
    shown = dict(line.split(maxsplit=1) for line in details(running, paint=plain))
    assert shown["run"] == "another  (digits)"
    assert shown["state"] == "running"
    assert shown["job"] == "2"
    assert shown["time"] == "50s of 2h"
    assert shown["directory"] == str(running.run.path)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (-1, "0s"), (59.4, "59s"), (100, "1m40s"), (700, "11m"), (11100, "3h05m"), (187200, "2d04h")],
)
def test_durations_are_readable(seconds: float | None, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("used", "limit", "text"),
    [(None, 7200, "0s of 2h"), (60, None, "1m00s"), (None, None, "-"), (90, 5400, "1m30s of 1h30m"),
     (5, 86400, "5s of 1d"), (5, 60, "5s of 1m")],
)  # fmt: skip
def test_what_is_used_of_a_limit_is_readable(used: float | None, limit: float | None, text: str) -> None:
    assert used_text(used, limit) == text


def test_neighbouring_ranks_are_drawn_together() -> None:
    assert ranks_text([7, 0, 1, 2, 4, 5, 6]) == "0-2, 4-7"
    assert ranks_text([3]) == "3"
