"""When the lines of a log were written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcddp.run.directory import times_of
from hpcddp.run.log_timestamps import TimestampWriter, read_times


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "rank-3.log"


def add(log: Path, text: str, at: float) -> None:
    with log.open("a") as stream:
        stream.write(text)
    os.utime(log, (at, at))


def test_growth_is_written_down_with_its_time(log: Path) -> None:
    writer = TimestampWriter(log)
    add(log, "12345", 100)
    writer.look()
    writer.look()
    add(log, "67", 200.25)
    writer.look()
    assert times_of(log).read_text() == "5 100.000\n7 200.250\n"
    times = read_times(log)
    assert [times.at(offset) for offset in (0, 4, 5, 6, 99)] == [100, 100, 200.25, 200.25, 200.25]


def test_what_nobody_looked_at_any_more_has_the_time_of_the_last_change(log: Path) -> None:
    writer = TimestampWriter(log)
    add(log, "12345", 100)
    writer.look()
    add(log, "last words", 300)
    times = read_times(log)
    assert (times.at(4), times.at(5)) == (100, 300)


@pytest.mark.parametrize("torn", ["7 2", "7", "x y\n", "5 900.0\n", "3 900.0\n", "\n"])
def test_torn_and_senseless_lines_are_passed_over(log: Path, torn: str) -> None:
    add(log, "1234567", 300)
    times_of(log).write_text(f"5 100.000\n{torn}")
    times = read_times(log)
    assert (times.at(0), times.at(6)) == (100, 300)


def test_a_log_that_is_gone_is_an_error_of_the_operating_system(log: Path) -> None:
    with pytest.raises(FileNotFoundError):
        TimestampWriter(log).look()
