"""The end of a task after an error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hpcddp.run.directory import RunDirectory
from hpcddp.run.failure import read_failures

PROGRAM = """
import signal, subprocess, sys
from pathlib import Path
from hpcddp.run.directory import RunDirectory
from hpcddp.task import __main__ as task

def raise_error(signum, frame):
    raise RuntimeError("DataLoader worker (pid 2) is killed by signal: Killed.")

save = task.save_failure

def save_while_a_process_ends(attempt, record):
    subprocess.run(["true"])
    save(attempt, record)

signal.signal(signal.SIGCHLD, raise_error)
task.save_failure = save_while_a_process_ends
task._exit_with_record(RunDirectory(Path(sys.argv[1])).attempt(0), ValueError("the first error"))
"""


def test_a_loader_process_that_ends_meanwhile_does_not_prevent_the_record(tmp_path: Path) -> None:
    attempt = RunDirectory(tmp_path).attempt(0)
    attempt.path.mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], env={"RANK": "0", "SLURM_PROCID": "0"}, timeout=60, check=False
    )
    assert done.returncode == 70
    assert [record.message for record in read_failures(attempt)] == ["the first error"]
