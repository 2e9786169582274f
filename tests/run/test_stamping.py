"""A task writes down when its log was written."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcddp.run import log_timestamps
from hpcddp.run.directory import times_of
from tests.waiting import wait_for_text


def test_growth_is_noticed_until_the_log_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_timestamps, "_LOOK_EVERY_S", 0.01)
    log = tmp_path / "rank-0.log"
    log.write_text("hello\n")
    thread = log_timestamps.record_timestamps(log)
    with log.open("a") as stream:
        stream.write("world\n")
    wait_for_text(times_of(log), "12 ")
    log.unlink()
    thread.join(timeout=30)
    assert not thread.is_alive()
