"""Commands of the tests as runs on the real Slurm."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

from hpcddp.run.directory import RunDirectory
from tests.cluster.jobs import HPCDDP
from tests.cluster.sandbox import Sandbox
from tests.cluster.tracked_run import TrackedRun


def start(sandbox: Sandbox, directory: Path, *words: str | Path, env: dict[str, str] | None = None) -> TrackedRun:
    """Submit a command from ``directory``."""
    environment = {"OMP_NUM_THREADS": "1", **(env or {})}
    done = sandbox.run(*HPCDDP, "submit", "--json", *words, cwd=directory, env=environment)
    document: dict[str, Any] = json.loads(done.stdout)
    run = RunDirectory(Path(document["run_dir"]))
    return TrackedRun(sandbox=sandbox, job=run.job_file, run=run, job_id=document["job_id"])


def script(directory: Path, text: str) -> Path:
    path = directory / "program.py"
    path.write_text(textwrap.dedent(text))
    return path
