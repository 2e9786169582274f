"""A disk that becomes full after an attempt has begun and before its tasks are at work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcddp.run.directory import AttemptDirectory, RunDirectory
from hpcddp.run.files import make_reserves
from hpcddp.run.job_records import PublishedAddress, Rank, publish_address, read_address, read_ranks, write_ranks
from hpcddp.task import program
from hpcddp.task.program import NoSpaceError
from tests.facts import assert_facts
from tests.messages import GoldenMessages
from tests.small_disk import FILLS, make_room, small_disk

Fill = Callable[[Path], None]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk") as mounted:
        yield mounted


@pytest.fixture(params=FILLS)
def fill(request: pytest.FixtureRequest) -> Fill:
    return FILLS[request.param]


@pytest.fixture
def attempt(disk: Path) -> AttemptDirectory:
    """An attempt as ``begin`` leaves it."""
    run = RunDirectory(disk / "run")
    run.attempt(0).path.mkdir(parents=True)
    make_reserves(run.reserves("meeting"))
    return run.attempt(0)


def test_ranks_meet_on_a_disk_that_has_become_full(attempt: AttemptDirectory, disk: Path, fill: Fill) -> None:
    fill(disk)
    address = PublishedAddress(host="n1", addresses=("10.0.0.1",), port=7)
    ranks = [Rank(host="n1"), Rank(host="n2")]
    publish_address(attempt, address)
    write_ranks(attempt, ranks)
    assert read_address(attempt) == address
    assert read_ranks(attempt) == tuple(ranks)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What was slept; the clock goes on by that alone."""
    seconds: list[float] = []
    monkeypatch.setattr("time.sleep", seconds.append)
    monkeypatch.setattr("time.monotonic", lambda: sum(seconds))
    return seconds


def test_a_program_is_not_started_before_there_is_space(
    attempt: AttemptDirectory,
    disk: Path,
    fill: Fill,
    slept: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    golden: GoldenMessages,
) -> None:
    fill(disk)

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if sum(slept) >= 60:
            make_room(disk)

    monkeypatch.setattr("time.sleep", sleep)
    program._wait_for_space(attempt, 0)
    assert sum(slept) == pytest.approx(60, abs=5)
    assert attempt.rank_exit_reserve(0).exists()
    assert_facts(golden.message(capfd.readouterr().err), f"the disk of {attempt.run.path} is full", "10 minutes")


def test_a_disk_that_stays_full_ends_the_task_as_a_failure_of_the_infrastructure(
    attempt: AttemptDirectory, disk: Path, fill: Fill, slept: list[float], golden: GoldenMessages
) -> None:
    fill(disk)
    with pytest.raises(NoSpaceError) as caught:
        program._wait_for_space(attempt, 0)
    assert sum(slept) == pytest.approx(600, abs=5)
    assert caught.value.exit_code == 71
    assert_facts(golden.message(caught.value), "the command is not started", "is full", "10 minutes")


def test_a_reserve_that_cannot_be_made_for_another_reason_keeps_no_program(
    attempt: AttemptDirectory, slept: list[float]
) -> None:
    attempt.path.rmdir()
    attempt.path.write_text("no directory")
    program._wait_for_space(attempt, 0)
    assert slept == []
