"""Commands that are submitted to this machine, and the ends of their runs."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

from hpcddp.run.directory import RunDirectory
from tests.command_line import hpcddp
from tests.waiting import wait_until


def submit(directory: Path, *words: str, code: int = 0) -> dict[str, Any]:
    """Submit a command and return what ``--json`` says."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = hpcddp(directory, "submit", "--cluster", "local", "--json", *words, environment=environment)
    assert done.returncode == code, done.stdout + done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def program(directory: Path, text: str) -> tuple[str, ...]:
    path = directory / "program.py"
    path.write_text(textwrap.dedent(text))
    return ("--", sys.executable, str(path))


def ended(document: dict[str, Any], timeout_s: float = 180) -> RunDirectory:
    """Wait for the run's result, and for the end of its script."""
    run = RunDirectory(Path(document["run_dir"]))
    script = Path(f"/proc/{document['job_id']}")
    wait_until(lambda: run.result.exists() and not script.exists(), run.batch_log.read_text, timeout_s)
    return run


def result(run: RunDirectory) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(run.result.read_text())
    return document
