"""A process that saves: ``checkpoint_process.py RUN ATTEMPT STEP...``; as a training does, without its torch."""

from __future__ import annotations

import os
import sys
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


def main(run: RunDirectory, attempt: int, steps: list[int]) -> int:
    faults.arm(os.environ.get(faults.VARIABLE), rank=0, attempt=attempt)
    run.attempt(attempt).path.mkdir(parents=True, exist_ok=True)
    best = Best(metric=os.environ["BEST"]) if "BEST" in os.environ else None
    writer = CheckpointWriter(
        run, attempt=attempt, keep=2, now=time.time, monotonic=time.monotonic, print_line=print, best=best
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
    return 0


def content(step: int) -> bytes:
    return f"state {step}".encode() * 10_000


if __name__ == "__main__":
    try:
        code = main(RunDirectory(Path(sys.argv[1])), int(sys.argv[2]), [int(step) for step in sys.argv[3:]])
    except HpcddpError as error:
        print(error.message, flush=True)
        code = int(error.exit_code)
    sys.exit(code)
