"""One run of a rehearsal: what it shows of a log, and what it says of processes that do not end."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcddp.errors import HpcddpError
from hpcddp.rehearse import trial
from hpcddp.rehearse.trial import MARK, Trial, end_processes
from hpcddp.run.directory import RunDirectory
from hpcddp.submission.submit import Submission


def test_of_a_long_log_only_the_end_is_read(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.attempt(0).path.mkdir(parents=True)
    log = run.attempt(0).rank_log(0)
    log.touch()
    os.truncate(log, 64 << 20)
    with log.open("a") as stream:
        stream.write("\nlast but one\nlast\n")
    job: Any = SimpleNamespace(job_id=str(os.getpid()))
    watched = Trial(Submission(run=run, cluster="local", job=job, dropped=(), epochs=1), tmp_path, 0)
    tracemalloc.start()
    try:
        assert watched.last_output()[-2:] == ["last but one", "last"]
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 8 << 20


def test_processes_that_do_not_end_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [sys.executable, "-c", "import time; time.sleep(60)"]
    processes = [subprocess.Popen(words, env={MARK: str(tmp_path)}) for _ in range(2)]
    monkeypatch.setattr(trial, "_END_S", 0.2)
    monkeypatch.setattr(os, "kill", lambda *_: None)
    try:
        with pytest.raises(HpcddpError, match=r"^processes \d+, \d+ of the rehearsal did not end after SIGKILL$"):
            end_processes(tmp_path)
    finally:
        monkeypatch.undo()
        for process in processes:
            process.kill()
            process.wait()
