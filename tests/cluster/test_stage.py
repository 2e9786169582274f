"""``environment.stage`` on a real Slurm: once on each node, before its ranks, and not again after a requeue."""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path

from hpcddp.run.directory import RunDirectory
from hpcddp.slurm.job import ENDED_STATES
from tests.cluster.jobs import finished, result_of, submit
from tests.cluster.sandbox import Sandbox

PROGRAM = """\
import os
from pathlib import Path

staged = Path(os.environ["HPCDDP_STAGED"])
attempt, rank = os.environ["HPCDDP_ATTEMPT"], os.environ["RANK"]
print("attempt", attempt, "rank", rank, staged.parent.name, (staged / "a").read_text())
if attempt == "0":
    Path(os.environ["HPCDDP_REQUEUE_FILE"]).touch()
"""


def prepare(directory: Path) -> Path:
    """Write a job of four ranks on two nodes, each with a scratch directory of its own, and return it."""
    (directory / "a").write_text("data")
    with tarfile.open(directory / "it's.tar", "w") as archive:
        archive.add(directory / "a", arcname="a")
    (directory / "train.py").write_text(PROGRAM)
    # The hosts of the sandbox share /tmp; this gives each a scratch of its own, as a site's prolog does.
    python = directory / "python"
    python.write_text(f"#!/bin/sh\nexport NODE_SCRATCH={directory}/$SLURMD_NODENAME\nexec '{sys.executable}' \"$@\"\n")
    python.chmod(0o700)
    job = {
        "name": "staged",
        "resources": {"nodes": 2, "tasks_per_node": 2, "nodelist": "n[1-2]", "time_limit": 10},
        "environment": {
            "python": str(python),
            "stage": {"source": str(directory / "it's.tar"), "target": "$NODE_SCRATCH/images"},
        },
        "command": [sys.executable, "train.py"],
    }
    path = directory / "job.yaml"
    path.write_text(json.dumps(job))
    return path


def test_each_node_copies_once_and_keeps_the_data_over_a_requeue(sandbox: Sandbox, tmp_path: Path) -> None:
    submitted = submit(sandbox, prepare(tmp_path))
    finished(sandbox, submitted["job_id"])
    run = RunDirectory(Path(submitted["run_dir"]))
    log = run.batch_log.read_text()
    for node in ("n1", "n2"):
        place = tmp_path / node / "images"
        there = f"hpcddp: environment.stage on {node}: {place} has the data"
        assert log.count(f"{there} after ") == 1, log
        assert log.count(f"{there} from an earlier attempt or job") == 1, log
        assert [path.name for path in place.parent.iterdir()] == ["images"]
    for number in (0, 1):
        logs = [run.attempt(number).rank_log(rank).read_text() for rank in range(4)]
        lines = [f"attempt {number} rank {rank} {'n1' if rank < 2 else 'n2'} data" for rank in range(4)]
        assert all(line in text for line, text in zip(lines, logs, strict=True)), logs


def test_a_node_without_the_source_ends_the_run_with_its_name(sandbox: Sandbox, tmp_path: Path) -> None:
    job = prepare(tmp_path)
    (tmp_path / "it's.tar").unlink()
    submitted = submit(sandbox, job)
    sandbox.wait(submitted["job_id"], states=ENDED_STATES - {"COMPLETED"})
    run = RunDirectory(Path(submitted["run_dir"]))
    result = result_of(run)
    assert result["status"] == "failed"
    assert f"{tmp_path / 'it'}" in result["reason"]
    assert result["reason"].startswith("environment.stage on n")
    assert not run.attempt(0).rank_log(0).exists()
