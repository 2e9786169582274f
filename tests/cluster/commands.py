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

# One rank raises; the others wait for it.
RAISES = """
    import os, time
    if os.environ["RANK"] == "{rank}":
        raise ValueError("my own mistake")
    time.sleep(600)
"""
# It saves its step when it is told to stop, and goes on from there; till then it is at work for 50 s.
SAVES = """
    import os, pathlib, signal, sys, time
    saved = pathlib.Path("saved")
    pause_s = 0.01 if saved.exists() else 0.5
    step = int(saved.read_text()) if saved.exists() else 0
    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(1))
    # In one write: the ranks of a launcher share the log.
    print(f"begins at {step}\\n", end="", flush=True)
    for step in range(step, 100):
        time.sleep(pause_s)
        if told:
            if os.environ["RANK"] == "0":
                saved.write_text(str(step + 1))
            sys.exit(CODE)
    print("all done", flush=True)
"""


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
