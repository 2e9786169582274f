"""A task writes down when its log was written."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hpcddp.run import log_timestamps
from hpcddp.run.log_timestamps import times_of


def test_growth_is_noticed_until_the_log_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_timestamps, "_LOOK_EVERY_S", 0.01)
    log = tmp_path / "rank-0.log"
    log.write_text("hello\n")
    thread = log_timestamps.record_timestamps(log)
    with log.open("a") as stream:
        stream.write("world\n")
    while not (times_of(log).exists() and "12 " in times_of(log).read_text()):
        time.sleep(0.01)
    log.unlink()
    thread.join(timeout=30)
    assert not thread.is_alive()
