"""The main job many times over: what holds once by luck does not hold twenty times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.jobs import finished, submit, write_job
from tests.cluster.models import SMALL_MODEL
from tests.cluster.sandbox import Sandbox

pytestmark = pytest.mark.long


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "small.py").write_text(SMALL_MODEL)
    return tmp_path


def run_result(submitted: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((Path(submitted["run_dir"]) / "result.json").read_text())
    return result


def test_eight_ranks_on_four_hosts_give_the_same_parameters_twenty_times_in_a_row(
    sandbox: Sandbox, directory: Path
) -> None:
    job = write_job(directory, nodes=4, tasks=2)
    hashes = set()
    for _ in range(20):
        submitted = submit(sandbox, job)
        assert finished(sandbox, submitted["job_id"])["ExitCode"] == "0:0"
        hashes.add(run_result(submitted)["parameters_sha256"])
    assert len(hashes) == 1


def test_two_jobs_at_the_same_moment_on_the_same_nodes_both_finish_ten_times_in_a_row(
    sandbox: Sandbox, directory: Path
) -> None:
    job = write_job(directory)
    for _ in range(10):
        both = [submit(sandbox, job) for _ in range(2)]
        for submitted in both:
            finished(sandbox, submitted["job_id"])
        assert len({run_result(submitted)["parameters_sha256"] for submitted in both}) == 1
