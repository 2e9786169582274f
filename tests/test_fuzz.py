"""Random job files, run directories and arguments: a short run of ``benchmarks/fuzz.py``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_no_random_input_shows_a_defect() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.fuzz", "--job-files=8", "--runs=3", "--arguments=15", "--seed=1"],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
