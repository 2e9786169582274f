"""The sbatch script of docs/own-loop.md, on a real Slurm: it comes back by itself, or stays cancelled."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcddp.run.checkpoints import list_checkpoints, newest_valid
from tests.cluster.sandbox import Sandbox
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
STEPS = 80


def script(run: Path) -> str:
    """Return the script as the document has it, with a shorter training in ``run``."""
    document = (ROOT / "docs" / "own-loop.md").read_text()
    found = re.search(r"^```bash\n(#!/bin/bash\n.*?)^```$", document, re.MULTILINE | re.DOTALL)
    assert found is not None
    command = "examples/own_loop.py runs/own-loop"
    assert command in found[1]
    return found[1].replace(command, f"examples/own_loop.py {run} --steps {STEPS} --save-every 20 --pause 0.1")


def submit(sandbox: Sandbox, folder: Path) -> tuple[str, Path]:
    (folder / "own-loop.sbatch").write_text(script(folder / "run"))
    log = folder / "log"
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    job = sandbox.submit(f"--output={log}", folder / "own-loop.sbatch", cwd=ROOT, env=environment)
    return job, log


def steps(log: Path) -> list[int]:
    text = log.read_text() if log.exists() else ""
    return [int(step) for step in re.findall(r"^(?:\d+: )?step (\d+)  ", text, re.MULTILINE)]


def wait_for_step(log: Path, step: int) -> None:
    wait_until(lambda: (steps(log) or [0])[-1] >= step, lambda: log.read_text() if log.exists() else f"no {log}", 120)


def test_script_of_the_document_has_nothing_for_shellcheck_to_say(tmp_path: Path) -> None:
    path = tmp_path / "own-loop.sbatch"
    path.write_text(script(tmp_path))
    done = subprocess.run(["shellcheck", str(path)], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.depends_on(
    "docs/own-loop.md",
    "examples/own_loop.py",
    "hpcddp/run",
    "hpcddp/stop",
    "hpcddp/train",
    "tests/cluster/test_own_loop.py",
)
def test_script_of_the_document_comes_back_and_loses_no_step(sandbox: Sandbox, tmp_path: Path) -> None:
    job, log = submit(sandbox, tmp_path)
    wait_for_step(log, 5)
    # The warning before the time limit, as Slurm sends it: to the ranks, not to the shell.
    sandbox.run("scancel", "--signal=USR2", job)
    ended = sandbox.wait(job, timeout=180)
    assert ended["Restarts"] == "1"
    assert steps(log) == list(range(1, STEPS + 1))
    newest = newest_valid(tmp_path / "run" / "checkpoints", expected=True, warn=pytest.fail)
    assert newest is not None
    assert newest.manifest.step == STEPS


@pytest.mark.long
def test_script_of_the_document_stays_cancelled(sandbox: Sandbox, tmp_path: Path) -> None:
    job, log = submit(sandbox, tmp_path)
    wait_for_step(log, 5)
    sandbox.run("scancel", job)
    ended = sandbox.wait(job, {"CANCELLED"})
    time.sleep(10)
    assert sandbox.job(job)["JobState"] == "CANCELLED"
    assert ended["Restarts"] == "0"
    # TERM came first, and the ranks had the time to save.
    assert list_checkpoints(tmp_path / "run" / "checkpoints")
