"""The run's own event log."""

import json
import os
from pathlib import Path

import pytest

from hpcddp.run.events import RECENT_BYTES, append_event, read_event_log, read_events
from hpcddp.stop.reasons import Cause
from hpcddp.supervise.budgets import count_requeues
from tests.messages import GoldenMessages


def test_events_come_back_in_order_with_their_facts(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append_event(path, kind="start", time=1.5, attempt=0, host="n1")
    append_event(path, kind="save", time=2.5, attempt=0, step=10, reason="interval")
    first, second = read_events(path)
    assert (first.kind, first.host, first.step) == ("start", "n1", None)
    assert (second.kind, second.step, second.reason) == ("save", 10, "interval")


def test_a_torn_last_line_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append_event(path, kind="start", time=1.0, attempt=0)
    with path.open("a") as stream:
        stream.write('{"event": "sa')
    assert [event.kind for event in read_events(path)] == ["start"]


def test_a_last_line_torn_within_a_character_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append_event(path, kind="start", time=1.0, attempt=0)
    with path.open("ab") as stream:
        stream.write('{"event": "failure", "reason": "ü'.encode()[:-1])
    assert [event.kind for event in read_events(path)] == ["start"]


def test_a_run_without_events_has_none(tmp_path: Path) -> None:
    assert read_events(tmp_path / "events.jsonl") == []


def test_a_damaged_line_is_left_out_counted_and_does_not_swallow_the_next(
    tmp_path: Path, golden: GoldenMessages
) -> None:
    path = tmp_path / "events.jsonl"
    append_event(path, kind="start", time=1.0, attempt=0)
    with path.open("ab") as stream:
        stream.write(
            b'7\nnull\n\xff\n[]\n{}\n{"format": 1, "event": "save", "time": "then", "attempt": 0}\n'
            b'{"event": "save", "time": 1.0, "attempt": 0}\n{"format": 1000}\n{"event": "s'
        )
    append_event(path, kind="stop", time=2.0, attempt=0, cause="crash", reason="one\u2028line")
    assert [event.kind for event in read_events(path)] == ["start", "stop"]
    log = read_event_log(path)
    assert (log.damaged, log.records[-1].cause) == (9, "crash")
    assert f"{path}: 9 lines are damaged" in golden.message(log.sentence(path))
    path.unlink()
    os.mkfifo(path)
    assert read_events(path) == []
    with pytest.raises(OSError, match="not a regular file"):
        append_event(path, kind="stop", time=2.0, attempt=0)


def test_what_is_counted_over_a_run_is_counted_in_a_long_log_too(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append_event(path, kind="requeue", time=0.0, attempt=0, cause="crash")
    save = json.dumps({"event": "save", "time": 1.0, "attempt": 0, "step": 1, "reason": "x" * 1000, "format": 1})
    with path.open("a") as stream:
        stream.writelines(f"{save}\n" for _ in range(9000))
    assert path.stat().st_size > RECENT_BYTES
    assert count_requeues(read_events(path)) == {Cause.CRASH: 1}
    assert 7000 < len(read_events(path, RECENT_BYTES)) < 9000


@pytest.mark.parametrize("time", [1e308, -1.0, 9e9])
def test_an_event_at_no_time_is_a_damaged_line(tmp_path: Path, time: float) -> None:
    log = tmp_path / "events.jsonl"
    for moment in (time, 1.0):
        with log.open("a") as stream:
            stream.write(json.dumps({"format": 1, "event": "start", "time": moment, "attempt": 0}) + "\n")
    found = read_event_log(log, 1 << 20)
    assert ([event.time for event in found.records], found.damaged) == ([1.0], 1)
