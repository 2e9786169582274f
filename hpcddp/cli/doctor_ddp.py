"""``hpcddp doctor ddp``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from hpcddp.cli.jobs import read_job
from hpcddp.cli.options import AsJson, JobFile, Overrides


def ddp(
    job_file: JobFile,
    *,
    overrides: Overrides = None,
    world_size: Annotated[
        int | None, typer.Option(metavar="W", help="Ranks.  [default: the job's, 2 at least and 4 at most]")
    ] = None,
    steps: Annotated[int, typer.Option(metavar="K", min=1, help="Optimizer steps to compare.")] = 3,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=1, help="How long each side may take.")] = 300,
    as_json: AsJson = False,
) -> None:
    """Train a few steps in one process and on W ranks, and say where and why they differ.

    The job's own model, data and loss run on this machine's CPUs, in float64 and with the same global batches of 32
    samples at most. Compared are first weights, samples, averaged gradients and parameters after each step. Dropout
    is off and local BatchNorm held still meanwhile; both are looked at by themselves. No GPU and no Slurm are needed.

    Exits 0 where both train the same; 1 for a defect; 2 if the job could not be run.

    Example: hpcddp doctor ddp job.yaml --world-size 4
    """
    from hpcddp.doctor.ddp import examine_job

    spec = read_job(job_file, overrides).spec
    found = examine_job(
        spec,
        world_size=world_size,
        steps=steps,
        directory=Path.cwd(),
        environment=os.environ,
        timeout_s=timeout,
    )
    typer.echo(json.dumps(found.as_json(), indent=2) if as_json else found.explain(), nl=as_json)
    raise typer.Exit(1 if found.defect else 0)
