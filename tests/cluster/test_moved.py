"""Runs on the real Slurm whose directory is moved or copied before they are resumed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from hpcddp.run.directory import RunDirectory
from hpcddp.run.sweep import read_sweep
from tests.cluster.jobs import HPCDDP, result_of, submit
from tests.cluster.sandbox import Sandbox

JOB = {
    "name": "again",
    "command": ["sh", "-c", "test -e ready"],
    "environment": {"env": {"WORD": "a b"}},
    "resources": {"time_limit": 5},
}


def resume(sandbox: Sandbox, run: Path) -> str:
    done = sandbox.run(*HPCDDP, "submit", "--resume", run, "--json")
    return str(json.loads(done.stdout)["job_id"])


def test_a_moved_run_goes_on_in_its_new_place_and_a_copy_is_refused(sandbox: Sandbox, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(json.dumps(JOB))
    submitted = submit(sandbox, job)
    sandbox.wait(submitted["job_id"], states={"FAILED"})
    (tmp_path / "ready").touch()
    run = RunDirectory(Path(submitted["run_dir"]))
    copy = tmp_path / "copy"
    shutil.copytree(run.path, copy)
    refused = sandbox.run(*HPCDDP, "submit", "--resume", copy, check=False)
    assert refused.returncode == 2
    assert f"{copy} is a copy of the run {run.path}" in refused.stderr
    assert result_of(run)["status"] == "failed"
    place = RunDirectory(run.path.rename(tmp_path / "moved"))
    sandbox.wait(resume(sandbox, place.path))
    assert result_of(place)["status"] == "finished"
    assert f"attempt 1 of run {place.run_id} begins" in place.batch_log.read_text()
    assert not run.path.exists()
    # The script of the copy names the place that the run was in, and is refused there when it is given to sbatch.
    place.path.rename(run.path)
    sandbox.wait(sandbox.submit(copy / "job.sbatch", cwd=tmp_path), states={"FAILED"})
    assert f"{copy}/job.sbatch acts on the run directory {run.path}" in run.batch_log.read_text()
    assert result_of(run)["status"] == "finished"


def test_an_element_of_a_moved_sweep_goes_on_in_its_new_place(sandbox: Sandbox, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(json.dumps({**JOB, "sweep": {"environment.env.WORD": ["a", "b"]}}))
    submitted = submit(sandbox, job)
    sweep = read_sweep(Path(submitted["sweep_dir"]))
    assert sweep is not None
    for index in (0, 1):
        sandbox.wait(str(sweep.job_id(index)), states={"FAILED"})
    (tmp_path / "ready").touch()
    place = sweep.path.parent.rename(tmp_path / "moved")
    element = RunDirectory(place / sweep.run_id(1))
    sandbox.wait(resume(sandbox, element.path))
    assert result_of(element)["status"] == "finished"
    assert not sweep.path.parent.exists()
