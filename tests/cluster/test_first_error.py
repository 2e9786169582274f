"""``logs --first-error`` after real crashes of one of eight ranks on two hosts of a real Slurm."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hpcddp.slurm.job import ENDED_STATES
from tests.cluster.jobs import HPCDDP, submit, write_job
from tests.cluster.sandbox import Sandbox
from tests.manage.crashes import check, crash


@pytest.mark.long("tests/manage/test_crashes.py crashes ranks on one host, and test_stop_failures.py names the host")
@pytest.mark.parametrize("seed", range(20))
def test_the_rank_that_failed_first_is_named_and_all_others_followed(
    sandbox: Sandbox, tmp_path: Path, seed: int
) -> None:
    told = crash(seed)
    shutil.copy(Path(__file__).with_name("traced_model.py"), tmp_path)
    train = {"model": "traced_model:build", "epochs": 40, "model_args": {"seconds": 0.02}}
    environment = {"env": {"HPCDDP_FAULTS": told.faults, "OMP_NUM_THREADS": "1"}}
    job = write_job(tmp_path, nodes=2, tasks=4, sections={"train": train, "environment": environment})
    sandbox.wait(submit(sandbox, job)["job_id"], states=ENDED_STATES, timeout=300)
    check(told, sandbox.run(*HPCDDP, "logs", "--first-error", cwd=tmp_path).stdout)
