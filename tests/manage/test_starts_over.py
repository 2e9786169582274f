"""A program that comes back twice and starts over each time is named; a false warning would be worse than none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from hpcddp.manage.overview_text import details
from hpcddp.manage.run_files import read_run_files
from hpcddp.manage.status import RunStatus, statuses
from hpcddp.manage.why import explain
from hpcddp.run.job_records import reserve_exit
from tests.manage.runs import NOON, FakeRun, make, queued
from tests.messages import GoldenMessages

FRESH = "loading 50000 samples took {seconds} s\nstep 1 loss 2.3010\nstep 2 loss 2.2544\nstep 3 loss 2.1903\n"


def came_back(made: FakeRun, logs: Sequence[str], *, command: bool = True) -> FakeRun:
    made.submitted()
    for attempt, text in enumerate(logs):
        made.started(attempt=attempt, at=10 * attempt).log(0, text.format(seconds=attempt + 0.125), attempt=attempt)
        if command:
            reserve_exit(made.attempt(attempt), 0)
    return made


def look(made: FakeRun) -> RunStatus:
    return statuses([read_run_files(made.run)], ask=lambda: [queued(restarts=2)], now=NOON + 100).runs[0]


def test_status_and_why_name_a_program_that_starts_over_each_time(tmp_path: Path, golden: GoldenMessages) -> None:
    status = look(came_back(make(tmp_path), [FRESH] * 3))
    sentence = golden.message(status.as_json()["starts_over"])
    assert "run-1 probably starts over" in sentence
    assert "attempts 0 to 2" in sentence
    assert "docs/any-script.md" in sentence
    assert sentence in details(status, paint=lambda text, _: text)
    assert f"  {sentence}" in list(explain(status).lines())


@pytest.mark.parametrize(
    "text",
    [
        "\rEpoch 0:  1%| | 1/90 [loss=2.3010]\rEpoch 0:  2%| | 2/90 [loss=2.2544]\rEpoch 0:  3%| | 3/90 [loss=2.1903]",
        "{{'train_loss': 2.3010}}\n{{'train_loss': 2.2544}}\n{{'train_loss': 2.1903}}\n",
        "[1/313]\tTime 0.1\tLoss: 2.3010 (2.3010)\n[2/313] Loss 2.2544\n[3/313] Loss 2.1903\n",
    ],
)
def test_the_usual_ways_to_print_a_loss_are_known(tmp_path: Path, text: str) -> None:
    sentence = look(came_back(make(tmp_path), [text] * 3)).files.starts_over
    assert sentence is not None
    assert "(2.3010, 2.2544, 2.1903)" in sentence


RESUMED = "resumed from step 3\nstep 4 loss 2.1001\nstep 5 loss 2.0444\nstep 6 loss 1.9903\n"


@pytest.mark.parametrize(
    "logs",
    [
        [FRESH] * 2,
        [FRESH, FRESH, RESUMED],
        [RESUMED, FRESH, FRESH],
        [FRESH, FRESH, FRESH[:60]],
        ["no loss in sight\n"] * 3,
        ["loss 0.0000\nloss 0.0000\nloss 0.0000\n"] * 3,
        # Two digits are equal by chance.
        ["loss 2.3\nloss 2.2\nloss 2.1\n"] * 3,
    ],
)
def test_a_program_that_may_have_resumed_is_not_named(tmp_path: Path, logs: list[str]) -> None:
    assert look(came_back(make(tmp_path), logs)).files.starts_over is None


def test_neither_a_finished_program_nor_the_built_in_training_is_named(tmp_path: Path) -> None:
    assert look(came_back(make(tmp_path, "r1"), [FRESH] * 3).ended("finished")).files.starts_over is None
    assert look(came_back(make(tmp_path, "r2"), [FRESH] * 3, command=False)).files.starts_over is None
