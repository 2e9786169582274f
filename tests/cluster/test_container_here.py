"""A container on this machine, without Slurm: the program of ``containers.py`` stands in for apptainer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpcddp.run.directory import RunDirectory
from tests.cluster.containers import install, write_image
from tests.cluster.jobs import result_of, write_job
from tests.cluster.models import SEE, SLOW_MODEL
from tests.waiting import wait_for_text, wait_until_gone

ROOT = Path(__file__).parents[2]


@pytest.mark.long("test_here ends runs in an allocation, and test_environments ends runs in containers")
def test_who_ends_a_run_in_containers_gets_it_saved(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    install(tmp_path / "bin")
    (tmp_path / "small.py").write_text(SLOW_MODEL)
    (tmp_path / "see.py").write_text(SEE)
    image = write_image(tmp_path / "i.sif", ROOT)
    environment = {"python": None, "container": {"image": str(image), "runtime": "apptainer"}}
    train = {"model_args": {"seconds": 0.05}, "epochs": 40}
    job = write_job(tmp_path, nodes=1, tasks=2, sections={"environment": environment, "train": train})
    variables = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    done = subprocess.run(
        [sys.executable, "-m", "hpcddp", "submit", str(job), "--cluster", "local", "--json"],
        cwd=tmp_path,
        env={**variables, "PATH": f"{tmp_path / 'bin'}:{variables['PATH']}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    run = RunDirectory(Path(answer["run_dir"]))
    wait_for_text(run.metrics, '"step": 30,')
    os.kill(int(answer["job_id"]), signal.SIGTERM)
    wait_until_gone(int(answer["job_id"]))
    result = result_of(run)
    assert result["status"] == "cancelled"
    assert result["saved_step"] >= 30
    # The container shows no other home than the job's own places.
    assert "home" not in json.loads((tmp_path / "seen-0.json").read_text())["root"]
