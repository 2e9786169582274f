"""``logs --first-error`` after real crashes of one of eight ranks on this machine."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.command_line import hpcddp
from tests.manage.crashes import RANKS, check, crash
from tests.submission.local_run import MODEL, ROOT

JOB = {
    "name": "crash",
    "resources": {"tasks_per_node": RANKS},
    "batch": {"global_batch_size": 64},
    "learning_rate": {"base": 0.1},
    "train": {"model": "small:build", "dataset": "digits", "epochs": 40},
    "trackers": {"use": []},
}
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}


def called(directory: Path, *words: str) -> str:
    return hpcddp(directory, *words, environment={**os.environ, **_ENVIRONMENT}).stdout


@pytest.mark.distributed
@pytest.mark.depends_on("hpcddp/manage", "hpcddp/run", "hpcddp/supervise", "hpcddp/task", "tests/manage")
@pytest.mark.parametrize(
    "seed",
    [2, *(pytest.param(seed, marks=pytest.mark.long("repetitions")) for seed in range(20) if seed != 2)],
)
def test_the_rank_that_failed_first_is_named_and_all_others_followed(tmp_path: Path, seed: int) -> None:
    told = crash(seed)
    (tmp_path / "small.py").write_text(MODEL)
    environment = {"env": {"HPCDDP_FAULTS": told.faults}}
    (tmp_path / "job.yaml").write_text(json.dumps({**JOB, "environment": environment}))
    called(tmp_path, "submit", "job.yaml", "--cluster", "local", "--follow")
    check(told, called(tmp_path, "logs", "--first-error"))
