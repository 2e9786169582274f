"""Measure the CPU time of commands beside their peers.

    python -m benchmarks.command_line [--rounds 20] [--output FILE]

``typer`` is an application of two empty commands with the same version of typer and no rich markup. ``torchx`` is
measured if it is on PATH: its dry run for Slurm of a script on 2 hosts with 4 ranks each. ``status`` lists 1,000 runs.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from benchmarks.turns import Case, cpu_of_children, in_turn, main

_RUNS: Final = 1000
_BARE: Final = """\
import typer

app = typer.Typer(rich_markup_mode=None)

@app.command()
def one(name: str) -> None:
    "Does nothing."

@app.command()
def two(name: str) -> None:
    "Does nothing."

app()
"""
_JOB: Final = """\
name: train
resources: {nodes: 2, tasks_per_node: 4, time_limit: 1h}
command: [python, train.py]
"""


def run(*words: str, directory: Path) -> None:
    """Run a program, without its output."""
    subprocess.run(words, cwd=directory, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)


def write_runs(hpcddp: str, directory: Path) -> None:
    """Write a thousand runs: copies of one that ran on this machine."""
    run(hpcddp, "submit", "--cluster", "local", "--", "true", directory=directory)
    (first,) = (directory / "runs" / "true").iterdir()
    while not (first / "result.json").exists():
        time.sleep(0.1)
    for number in range(1, _RUNS):
        shutil.copytree(first, first.with_name(f"20260101-{number:06}-0000"))


def cases(rounds: int) -> Iterator[Case]:
    """Yield the comparisons."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "bare.py").write_text(_BARE)
        (directory / "job.yaml").write_text(_JOB)
        (directory / "train.py").touch()
        hpcddp = shutil.which("hpcddp") or "hpcddp"

        def cpu_of(*words: str) -> Callable[[], float]:
            return lambda: cpu_of_children(lambda: run(*words, directory=directory)) * 1e3

        yield in_turn(
            "--help",
            {
                "hpcddp": cpu_of(hpcddp, "--help"),
                "typer": cpu_of(sys.executable, "bare.py", "--help"),
                "python -c pass": cpu_of(sys.executable, "-c", "pass"),
            },
            base="typer",
            unit="ms of CPU",
            rounds=rounds,
        )
        ways = {"hpcddp": cpu_of(hpcddp, "render", "job.yaml")}
        torchx = shutil.which("torchx")
        if torchx is not None:
            words = ["run", "--workspace=", "--scheduler", "slurm", "--dryrun"]
            words += ["dist.ddp", "-j", "2x4", "--script", "train.py"]
            ways["torchx"] = cpu_of(torchx, *words)
        yield in_turn("render", ways, base="torchx" if torchx else "hpcddp", unit="ms of CPU", rounds=rounds)
        write_runs(hpcddp, directory)
        yield in_turn(
            f"status of {_RUNS} runs",
            {
                "hpcddp": cpu_of(hpcddp, "status", "--run-root", "runs"),
                "--help": cpu_of(hpcddp, "--help"),
            },
            base="--help",
            unit="ms of CPU",
            rounds=rounds,
        )


if __name__ == "__main__":
    main("benchmarks.command_line", __doc__, cases, rounds=20)
