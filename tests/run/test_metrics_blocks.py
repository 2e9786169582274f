"""A metrics log is read as its lines hold it, also where lines are damaged; of a long log, some of each kind."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.run.files import LONGEST_LINE
from hpcddp.run.metrics import ThinnedMetrics, read_metrics

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
    reader = ThinnedMetrics(path)
    steps = [document["step"] for document in reader]
    return steps, reader.damaged


@given(st.lists(LINES, max_size=12))
def test_the_documents_are_those_of_the_lines(lines: list[bytes]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        (steps, damaged), records = steps_of(path), read_metrics(path, 1 << 20).records
        documents = list(ThinnedMetrics(path))
    assert steps == [record.step for record in records]
    for document, record in zip(documents, records, strict=True):
        assert all(str(document.get(name)) == str(record.facts.get(name)) for name in ("loss", "val", "x"))
    whole = [line for line in lines if line.strip()]
    assert damaged == len(whole) - len(steps)


def test_of_a_long_log_some_steps_and_all_rare_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with path.open("w") as stream:
        for step in range(1, 200_001):
            stream.write(json.dumps({"step": step, "loss": 1 / step, "lr": 1e-5 * step, "time": 1e9 + step}) + "\n")
            if step % 1000 == 0:
                stream.write(json.dumps({"step": step, "val_loss": step / 3}) + "\n")
            if step == 77_777:
                stream.write('{"step": 77777, "note": "x", "accuracy": 0.5}\n{"step": tru\n')
        stream.write('{"step": 200001, "lo')
    reader = ThinnedMetrics(path)
    documents = list(reader)
    losses = [document["step"] for document in documents if "loss" in document]
    assert 30_000 < len(losses) < 50_000
    assert losses[-1] == 200_000
    assert max(later - step for step, later in pairwise(losses)) < 1200
    assert [document["step"] for document in documents if "val_loss" in document] == list(range(1000, 200_001, 1000))
    assert [document["accuracy"] for document in documents if "note" in document] == [0.5]
    assert reader.damaged == 1


def test_texts_that_all_differ_do_not_make_each_line_a_kind(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    words = ("".join(chr(97 + step // 26**place % 26) for place in range(5)) for step in range(200_000))
    path.write_text("".join(json.dumps({"step": 1, "note": word}) + "\n" for word in words))
    assert len(steps_of(path)[0]) < 100_000


def test_a_line_that_is_still_being_written_is_not_damaged(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "lo')
    assert steps_of(path) == ([1], 0)
    path.write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 2.0}')
    assert [document["loss"] for document in ThinnedMetrics(path)] == [2.5, 2.0]


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
    monkeypatch.setattr("hpcddp.run.metrics.LARGEST_RECORD", 100)
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "loss": 1.5}) + "\n" for step in range(100)))
    assert steps_of(path) == ([97, 98, 99], 0)
