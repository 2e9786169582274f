"""The last records of a log."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcddp.run.metrics import read_metrics
from hpcddp.run.record import RecordError
from tests.run.damage import link


def steps(path: Path, size: int = 1000) -> list[int]:
    return [line.step for line in read_metrics(path, size).records]


def test_torn_lines_at_both_ends_and_what_is_no_record_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n7\n{"step": 3}\n{"st')
    assert steps(path) == [1, 2, 3]
    # Begins within the first record.
    assert steps(path, 30) == [2, 3]
    assert steps(tmp_path / "nothing") == []


def test_only_what_is_damaged_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n7\n{"step": 3}\n{"st')
    assert read_metrics(path, 1000).damaged == 1
    # The torn lines at both ends are not.
    assert read_metrics(path, 15).damaged == 0


def test_any_name_may_be_one_of_the_users_own_numbers(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "format": 2.5, "facts": 3, "time": 4.0}\n{"step": 2, "format": 1000}\n')
    lines = read_metrics(path, 1000)
    assert (lines.damaged, [line.facts for line in lines.records]) == (
        0,
        [{"format": 2.5, "facts": 3}, {"format": 1000}],
    )


def test_a_log_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    link(path)
    with pytest.raises(RecordError, match="cannot be read") as caught:
        read_metrics(path, 1000)
    assert caught.value.path == path
