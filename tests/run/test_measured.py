from __future__ import annotations

import json
import os
from pathlib import Path

from hpcddp.run.result import newest_noise_scale


def finish(runs: Path, run_id: str, text: str, *, written: int) -> None:
    (runs / run_id).mkdir(parents=True)
    (runs / run_id / "result.json").write_text(text)
    os.utime(runs / run_id / "result.json", (written, written))


def test_newest_run_that_measured_it_counts(tmp_path: Path) -> None:
    finish(tmp_path, "b", json.dumps({"format": 1, "status": "finished", "noise_scale": 20.5}), written=1)
    finish(tmp_path, "a", json.dumps({"format": 1, "status": "finished", "noise_scale": 31}), written=2)
    finish(tmp_path, "later", json.dumps({"format": 1, "status": "finished", "noise_scale": None}), written=3)
    finish(tmp_path, "damaged", "{", written=4)
    finish(tmp_path, "list", "[1]", written=5)
    finish(tmp_path, "negative", json.dumps({"format": 1, "status": "finished", "noise_scale": -1}), written=6)
    (tmp_path / "running").mkdir()
    assert newest_noise_scale(tmp_path) == ("a", 31.0)


def test_nothing_is_known_without_runs(tmp_path: Path) -> None:
    assert newest_noise_scale(tmp_path / "absent") is None
    (tmp_path / "file").write_text("")
    assert newest_noise_scale(tmp_path) is None
