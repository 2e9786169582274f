"""The last records of a file."""

from __future__ import annotations

from pathlib import Path

from hpcddp.run.tail import tail_records


def test_torn_lines_at_both_ends_and_what_is_no_record_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n7\n{"step": 3}\n{"st')
    assert tail_records(path) == [{"step": 1}, {"step": 2}, {"step": 3}]
    # Begins within the first record.
    assert tail_records(path, 30) == [{"step": 2}, {"step": 3}]
    assert tail_records(tmp_path / "nothing") == []
