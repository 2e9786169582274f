"""The start of a task, and the function of the pickle."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpcddp.run.directory import RunDirectory
from hpcddp.run.failure import read_failures
from hpcddp.stop.listener import LISTENER
from hpcddp.task.work import NotATaskError, run
from tests.submit.local_run import ROOT


def test_the_function_of_the_pickle_runs_in_a_task_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LISTENER, "reinstall", lambda: None)
    with pytest.raises(NotATaskError, match="outside of a task; start tasks with python -m"):
        run(str(tmp_path))


def test_a_task_whose_rank_environment_is_wrong_writes_a_record_of_its_rank(tmp_path: Path) -> None:
    attempt = RunDirectory(tmp_path / "run").attempt(0)
    attempt.path.mkdir(parents=True)
    environment = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "3", "SLURMD_NODENAME": "n4"}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "hpcddp.task"],
        env={"PYTHONPATH": str(ROOT), "HPCDDP_ATTEMPT_DIR": str(attempt.path), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    (record,) = read_failures(attempt)
    assert (record.rank, record.host, record.kind, record.exit_code) == (3, "n4", "rank_environment", 71)
    assert done.returncode == 71
    assert "rank 3 on n4 failed: rank_environment: this process runs inside Slurm job 7" in done.stderr
