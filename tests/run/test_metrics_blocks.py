"""The blocks of a metrics log hold what its lines hold, also where lines are damaged."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.run.files import LONGEST_LINE
from hpcddp.run.metrics import read_metrics
from hpcddp.run.metrics_reader import MetricsReader

VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.lists(st.integers(), max_size=2)
)
STEPS = st.one_of(st.integers(0, 2**40), VALUES)
DOCUMENTS = st.dictionaries(st.sampled_from(["loss", "val", "x"]), VALUES, max_size=3)
LINES = st.one_of(
    st.builds(lambda facts, step: json.dumps({"step": step, **facts}).encode(), DOCUMENTS, STEPS),
    st.sampled_from([b"", b"{", b"1,2", b"[]", b"\xff", b"{}", b'{"step": 1}, {"step": 2}', b"nan", b"[" * 3000]),
    # What json.loads takes for UTF-16 and UTF-32.
    st.sampled_from(['{"step": 3}'.encode("utf-16-be"), b'\0\0\0{"step": 3}', b"7\0\0\0"]),
)


def steps_of(path: Path) -> tuple[list[int], int]:
    """Return the steps of a log, and how many of its lines are damaged."""
    reader = MetricsReader(path)
    steps = [step for block in reader for step in block.steps]
    return steps, reader.damaged


def numbers_of(path: Path, name: str) -> list[float]:
    blocks = [(block.steps, block.numbers.get(name)) for block in MetricsReader(path)]
    return [value for steps, numbers in blocks for value in numbers or [math.nan] * len(steps)]


def expected(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**53
    return float(value) if is_number or (isinstance(value, float) and math.isfinite(value)) else math.nan


@given(st.lists(LINES, max_size=12))
def test_the_numbers_are_those_of_the_lines(lines: list[bytes]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        (steps, damaged), records = steps_of(path), read_metrics(path, 1 << 20).records
        columns = {name: numbers_of(path, name) for name in ("loss", "val", "x")}
    assert steps == [record.step for record in records]
    for name, column in columns.items():
        values = [expected(record.facts.get(name)) for record in records]
        assert all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(column, values, strict=True))
    whole = [line for line in lines if line.strip()]
    assert damaged == len(whole) - len(steps)


def test_a_line_that_is_still_being_written_is_not_damaged(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "lo')
    assert steps_of(path) == ([1], 0)
    path.write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 2.0}')
    assert numbers_of(path, "loss") == [2.5, 2.0]


def test_the_hole_at_the_end_of_a_log_is_one_damaged_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2}\n')
    os.truncate(path, LONGEST_LINE + 100)
    assert steps_of(path) == ([1], 0)
    with path.open("ab") as stream:
        stream.write(b'\n{"step": 2, "loss": 1}\n')
    assert steps_of(path) == ([1, 2], 1)


def test_no_file_has_no_lines(tmp_path: Path) -> None:
    assert steps_of(tmp_path / "metrics.jsonl") == ([], 0)


def test_of_a_log_that_is_too_large_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcddp.run.metrics_reader.LARGEST_RECORD", 100)
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "loss": 1.5}) + "\n" for step in range(100)))
    assert steps_of(path) == ([97, 98, 99], 0)
