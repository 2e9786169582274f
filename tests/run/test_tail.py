"""The last records of a log."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.run import record
from hpcddp.run.files import begin_of_last_lines
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
    assert read_metrics(path, 17).damaged == 0


@pytest.mark.parametrize("last", ['{"step": 4, "x": "%s"', '{"step": 4, "x": "%s\n', "%s\n"])
def test_a_very_long_line_that_is_damaged_hides_no_record_before_it(tmp_path: Path, last: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n' + last % ("x" * 200_000))
    assert steps(path)[-1] == 2


def test_a_log_without_any_record_is_not_read_to_its_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    monkeypatch.setattr(record, "_MOST_SEARCHED", 5000)
    path.write_text('{"step": 1}\n' + "x" * 10_000)
    assert steps(path) == []
    path.write_text('{"step": 1}\n' + '{"loss": 1}\n' * 200)
    assert steps(path) == []


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


@given(text=st.text("ab\n\r", max_size=40), count=st.integers(0, 6), begin=st.integers(0, 8), end=st.integers(0, 45))
def test_the_last_lines_begin_where_a_read_of_the_whole_file_says(
    text: str, count: int, begin: int, end: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "log"
    path.write_bytes(text.encode())
    whole = text.encode()[:end][begin:]
    lines = re.findall(rb"[^\n]*\n|[^\n]+\Z", whole)
    wanted = b"".join(lines[len(lines) - min(count, len(lines)) :])
    found = begin_of_last_lines(path, count, begin=begin, end=end)
    assert text.encode()[:end][found:] == wanted


def test_the_last_lines_of_a_large_file_are_found_from_its_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as stream:
        # Three gigabytes of nothing: a read from the beginning would take minutes.
        stream.truncate(3 << 30)
        stream.seek(0, 2)
        stream.write(b"\nlast but one\nlast\n")
    begin = begin_of_last_lines(path, 2)
    assert path.stat().st_size - begin == len(b"last but one\nlast\n")
