"""``hpcddp rehearse`` finds each planted fault of the scripts beside this file, and passes the right ones."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import hpcddp

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
REPORT = "HPCDDP_REHEARSALS"
"""Environment variable: the file to which every rehearsal is appended, for docs/measurements.md."""
pytestmark = [pytest.mark.long("each rehearsal starts ranks with torch a dozen times"), pytest.mark.distributed]

PLANTED = (
    ("optimizer_missing", "preemption", "differs"),
    ("scheduler_missing", "preemption", "differs"),
    ("scheduler_twice", "preemption", "differs"),
    ("epoch_from_its_beginning", "preemption", "differs"),
    ("epoch_of_the_sampler", "preemption", "differs"),
    ("generators_missing", "preemption", "differs"),
    ("buffers_missing", "preemption", "differs"),
    ("average_missing", "preemption", "differs"),
    ("scaler_missing", "preemption", "differs"),
    ("torn_file", "damaged-checkpoint", "lost"),
    ("leaves_without_saving", "preemption", "starts over"),
    ("step_off_by_one", "preemption", "differs"),
    ("starts_over", "kill", "starts over"),
    ("saves_alone", "preemption", "starts over"),
    ("unseeded", "cancel", "differs"),
)
RIGHT = {
    "a loop of its own": ["--tasks-per-node", "2", "--", "python", "training.py"],
    "Stopper and Checkpointer": [
        "--tasks-per-node", "2", "--", "bash", "-c",
        'exec python own_loop.py "$HPCDDP_RUN_DIR" --steps 60 --save-every 10 --pause 0.1',
    ],
    "a function": ["function.yaml"],
    "Lightning": ["--tasks-per-node", "2", "--", "python", "with_lightning.py"],
    "accelerate": ["--tasks-per-node", "2", "--", "python", "with_accelerate.py"],
    "torchrun": ["--tasks-per-node", "2", "--", "torchrun", "with_torchrun.py"],
    "the built-in training": ["quickstart.yaml"],
}  # fmt: skip


@pytest.fixture
def project(tmp_path: Path) -> Path:
    directory = tmp_path / "project"
    shutil.copytree(SCRIPTS, directory)
    shutil.copy(ROOT / "examples" / "own_loop.py", directory)
    shutil.copy(ROOT / "jobs" / "quickstart.yaml", directory)
    (directory / "function.yaml").write_text(
        "name: a-function\nresources: {tasks_per_node: 2}\nentrypoint: a_function:main\n"
    )
    return directory


def rehearse(project: Path, name: str, *words: str) -> dict[str, Any]:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = hpcddp(project, "rehearse", "--json", *words, environment=environment, timeout_s=1800)
    assert done.stdout, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)["rehearsals"][0]
    assert done.returncode == (0 if document["ok"] else 1)
    if report := os.environ.get(REPORT):
        with Path(report).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"name": name, **document}) + "\n")
    return document


@pytest.mark.parametrize(("script", "fault", "verdict"), PLANTED, ids=[row[0] for row in PLANTED])
def test_each_planted_fault_is_found(project: Path, script: str, fault: str, verdict: str) -> None:
    words = ("--tasks-per-node", "2", "--fault", fault, "--", "python", f"{script}.py")
    document = rehearse(project, script, *words)
    (trial,) = document["faults"]
    assert (document["ok"], trial["verdict"]) == (False, verdict), document


@pytest.mark.parametrize("name", RIGHT)
def test_each_right_job_comes_back_from_every_fault(project: Path, name: str) -> None:
    document = rehearse(project, name, *RIGHT[name])
    assert document["ok"], document
    assert len(document["faults"]) == 6
