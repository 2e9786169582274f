"""Ranks that srun binds to too few CPUs: why and report say so, and the flag that they name binds them well."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hpcddp.run.directory import RunDirectory
from hpcddp.run.job_records import read_ranks
from tests.cluster.jobs import HPCDDP, finished
from tests.cluster.sandboxes import QUICK, sandbox_with

SAME = (
    "all ranks on n1 run on the same CPUs (0), and the job asks for 2 there: give each task its own with "
    "resources.srun: {cpu-bind: cores}"
)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="this machine has one CPU")
def test_ranks_on_the_same_cpu_are_told_until_they_have_their_own(tmp_path: Path) -> None:
    launcher = tmp_path / "torchrun"
    launcher.write_text("#!/bin/sh\n")
    launcher.chmod(0o755)
    (tmp_path / "train.py").touch()
    runs = {
        "map_cpu:0,0": ("true",),
        "map_cpu:0": (str(launcher), "--nproc-per-node", "2", "train.py"),
        "cores": ("true",),
        "mask_cpu:0x2,0x1": ("true",),
    }
    with sandbox_with(*QUICK, "TaskPlugin=task/affinity", options=("--nodes", "1")) as sandbox:
        submitted = []
        for flag, program in runs.items():
            words = ("--time", "5", "--set", "resources.tasks_per_node=2", "--set", f"resources.srun.cpu-bind={flag}")
            done = sandbox.run(*HPCDDP, "submit", "--json", *words, "--", *program, cwd=tmp_path)
            submitted.append(json.loads(done.stdout))
        cpus = []
        told = []
        for answer in submitted:
            finished(sandbox, answer["job_id"])
            ranks = read_ranks(RunDirectory(Path(answer["run_dir"])).attempt(0)) or ()
            cpus.append([rank.binding and rank.binding.cpus for rank in ranks])
            told.append(f"  {SAME}\n" in sandbox.run(*HPCDDP, "why", answer["run_dir"], cwd=tmp_path).stdout)
        report = sandbox.run(*HPCDDP, "report", submitted[0]["run_dir"], "--json", cwd=tmp_path).stdout
    assert cpus == [["0", "0"], ["0"], ["0", "1"], ["1", "0"]]
    assert told == [True, True, False, False]
    assert json.loads(report)["runs"][0]["hindrances"] == [SAME]
