"""The command ``hpcddp rehearse``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from hpcddp.cli.job_arguments import JobCommand, JobWords, takes_job_words
from hpcddp.cli.options import AsJson, JobFileOrNone, Overrides
from hpcddp.cli.output import echo


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(cls=JobCommand)(takes_job_words(rehearse))


def _complete_faults(incomplete: str) -> list[str]:
    from hpcddp.rehearse.faults import FAULTS

    return [fault.name for fault in FAULTS if fault.name.startswith(incomplete)]


def rehearse(
    job_file: JobFileOrNone = None,
    *,
    overrides: Overrides = None,
    faults: Annotated[
        list[str] | None,
        typer.Option("--fault", metavar="NAME", help="Only this fault; repeatable.", autocompletion=_complete_faults),
    ] = None,
    linked: Annotated[
        list[Path] | None,
        typer.Option("--link", metavar="PATH", help="Data that git ignores and the program reads; repeatable."),
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=1, help="Longest time of one attempt.")] = 300,
    keep: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep the runs in this new directory.")] = None,
    as_json: AsJson = False,
    words: JobWords,
) -> None:
    """Try whether a job comes back from faults, before it must.

    The job runs small on this machine: once without a fault, then under a preemption, a time limit, a killed rank, a
    damaged checkpoint, another world size and a cancel, after each of which it is resumed and compared. The exit code
    is 0 if it comes back equal from all, 1 if not.

    Example: hpcddp rehearse job.yaml

    Example: hpcddp rehearse --tasks-per-node 2 -- python train.py --epochs 2
    """
    from hpcddp.rehearse.rehearsal import choose_faults
    from hpcddp.rehearse.rehearsal import rehearse as rehearse_job
    from hpcddp.rehearse.table import lines_of

    chosen = choose_faults(faults or ())
    job = words.load(job_file, overrides=overrides)
    report = rehearse_job(
        job,
        faults=chosen,
        directory=Path.cwd(),
        linked=linked or (),
        keep=keep,
        python=job.spec.environment.interpreter or sys.executable,
        environment=dict(os.environ),
        timeout_s=timeout,
        say=lambda line: echo(line, err=True),
    )
    if as_json:
        echo(json.dumps(report.as_json(), indent=2))
    else:
        for line in lines_of(report):
            echo(line)
    raise typer.Exit(0 if report.is_good else 1)
