"""Slurms of four hosts, each started for somebody and taken away without a trace."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpcddp.sandbox import state
from hpcddp.sandbox.sandbox import slurm_environment
from tests.cluster.sandbox import Sandbox
from tests.sandbox.leftovers import leftovers

SANDBOX = (sys.executable, "-P", "-m", "hpcddp", "sandbox")
# Signals, requeues and lost nodes take seconds, not minutes.
QUICK = ("AuthInfo=cred_expire=5", "KillWait=15", "SlurmdTimeout=15")


@contextlib.contextmanager
def sandbox_with(*settings: str, options: Sequence[str] = ()) -> Iterator[Sandbox]:
    """Start a Slurm of four hosts with settings, and options of ``up``, of its own, and take it away."""
    # Paths of sockets are short, pytest's temporary directories are not.
    directory = Path(tempfile.mkdtemp(prefix="hpcddp-"))
    try:
        yield from _sandbox(directory, settings, options)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _sandbox(parent: Path, settings: Sequence[str], more: Sequence[str]) -> Iterator[Sandbox]:
    directory = parent / "sandbox"
    options = [word for setting in settings for word in ("--conf", setting)]
    started = _sandbox_command("up", directory, "--nodes", "4", "--hosts", "namespaces", *options, *more)
    assert started.returncode == 0, started.stdout + started.stderr
    document = json.loads(started.stdout)
    known = state.read(directory)
    assert known is not None
    slurm_conf = Path(document["slurm_conf"])
    try:
        yield Sandbox(
            slurm_conf=slurm_conf,
            environment=slurm_environment(known, _without_slurm()),
            nodes=tuple(document["nodes"]),
        )
    finally:
        ended = _sandbox_command("down", directory)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    assert leftovers(known) == []


def _sandbox_command(verb: str, directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        (*SANDBOX, verb, "--dir", str(directory), "--json", *options),
        env=_without_slurm(),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def _without_slurm() -> dict[str, str]:
    """Return this process's environment without what an outer Slurm says."""
    prefixes = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SINFO_")
    return {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
