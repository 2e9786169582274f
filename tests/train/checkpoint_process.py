"""A process that saves as a training does, without its torch; it is forked from one that has imported the package."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import IO

from hpcddp.errors import HpcddpError
from hpcddp.jobfile.fields import Best
from hpcddp.run.checkpoints import Manifest
from hpcddp.run.directory import RunDirectory
from hpcddp.run.publish import remove_unfinished
from hpcddp.stop import faults
from hpcddp.train.checkpoint.writer import CheckpointWriter
from tests.ranks import ForkedProcess


def start(run: RunDirectory, attempt: int, *steps: int, fault: str = "", best: str | None = None) -> ForkedProcess:
    """Start a process that saves these steps; its output is in ``output_of(run, attempt)``."""
    return ForkedProcess(
        _main,
        (run, attempt, steps, best),
        environment={**os.environ, faults.VARIABLE: fault},
        directory=run.path,
        output=output_of(run, attempt),
    )


def output_of(run: RunDirectory, attempt: int) -> Path:
    return run.path / f"output-{attempt}"


def _main(run: RunDirectory, attempt: int, steps: tuple[int, ...], best: str | None) -> int:
    try:
        _save(run, attempt, steps, best)
    except HpcddpError as error:
        print(error.message, flush=True)
        return int(error.exit_code)
    return 0


def _save(run: RunDirectory, attempt: int, steps: tuple[int, ...], best: str | None) -> None:
    faults.arm(os.environ.get(faults.VARIABLE), rank=0, attempt=attempt)
    run.attempt(attempt).path.mkdir(parents=True, exist_ok=True)
    writer = CheckpointWriter(
        run,
        attempt=attempt,
        keep=2,
        now=time.time,
        monotonic=time.monotonic,
        print_line=print,
        best=None if best is None else Best(metric=best),
    )
    remove_unfinished(run.checkpoints, attempt=attempt)
    writer.keep_best()
    for step in steps:

        def write(stream: IO[bytes], step: int = step) -> None:
            stream.write(content(step))

        manifest = Manifest(
            step=step, attempt=attempt, time=time.time(), contract={}, progress={}, information={}, files={}
        )
        writer.start(manifest, {"model.pt": write, "optimizer.pt": write}, reason="test", began=time.monotonic())
        writer.wait()


def content(step: int) -> bytes:
    return f"state {step}".encode() * 10_000
