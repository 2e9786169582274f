"""Allocations of salloc, into whose shell a test types lines."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcddp.run.directory import RunDirectory
from hpcddp.run.job_records import newest_start
from tests.cluster.jobs import HPCDDP, result_of
from tests.cluster.sandbox import Sandbox
from tests.waiting import wait_until


@dataclass(frozen=True, kw_only=True)
class Typed:
    """What came of a line that was typed into a shell."""

    code: int
    stdout: str
    stderr: str


@dataclass(kw_only=True)
class Shell:
    """The shell that salloc has opened; lines are typed into it.

    Attributes:
        job_id: the allocation.
    """

    process: subprocess.Popen[str]
    directory: Path
    job_id: str = ""
    lines: int = 0

    def type(self, *words: str, timeout: float = 240) -> Typed:
        """Type a command, wait for its end and return what it printed."""
        self.lines += 1
        paths = [self.directory / f"{name}-{self.lines}" for name in ("code", "out", "err")]
        code, out, err = (shlex.quote(str(path)) for path in paths)
        assert self.process.stdin is not None
        self.process.stdin.write(f"{shlex.join(words)} >{out} 2>{err}; echo $? >{code}\n")
        self.process.stdin.flush()
        wait_until(lambda: paths[0].exists() and paths[0].read_text().endswith("\n"), f"the end of {words}", timeout)
        return Typed(code=int(paths[0].read_text()), stdout=paths[1].read_text(), stderr=paths[2].read_text())

    def submit(self, *words: str | Path) -> dict[str, Any]:
        """Submit a job here, and return what ``submit --json`` printed."""
        typed = self.type(*HPCDDP, "submit", "--json", *(str(word) for word in words))
        assert typed.code == 0, typed.stdout + typed.stderr
        document: dict[str, Any] = json.loads(typed.stdout)
        return document


@contextmanager
def salloc(sandbox: Sandbox, directory: Path, *options: str) -> Iterator[Shell]:
    """Open the shell of an allocation."""
    notes = directory / "shell"
    notes.mkdir()
    with (notes / "salloc").open("w") as log:
        process = subprocess.Popen(
            ["salloc", *options, "bash"],
            cwd=directory,
            env=sandbox.environment,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            text=True,
        )
    shell = Shell(process=process, directory=notes)
    try:
        shell.job_id = shell.type("printenv", "SLURM_JOB_ID").stdout.strip()
        yield shell
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)


def result_when_ended(run: RunDirectory) -> dict[str, Any]:
    """Wait until the script of a run has ended, and return the result of the run."""
    wait_until(run.result.exists, lambda: f"a result:\n{run.batch_log.read_text()}", 180)
    start = newest_start(run)
    assert start is not None
    wait_until(lambda: not Path(f"/proc/{start.job_id}").exists(), "the end of the script", 60)
    return result_of(run)
