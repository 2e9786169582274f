"""Sweeps and dependencies on the command line: their options, and the output about a submitted sweep."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcddp.cli.options import word_for
from hpcddp.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpcddp.jobfile.cluster import Cluster
    from hpcddp.jobfile.overrides import Override
    from hpcddp.submit.sweep import SweepSubmission

Axes = Annotated[
    list[str] | None,
    typer.Option(
        "--sweep",
        metavar="KEY=VALUES",
        help="One run each, train.seed=0..4; repeatable.",
    ),
]
SweepFile = Annotated[
    Path | None,
    typer.Option(
        "--sweep-file",
        metavar="FILE",
        help="One run for each row of a CSV, or mapping of a YAML or JSON list.",
        hidden=True,
    ),
]
MaxParallel = Annotated[
    int | None, typer.Option("--max-parallel", metavar="N", min=1, help="Elements of a sweep that run at once.")
]
After = Annotated[
    list[str] | None,
    typer.Option("--after", metavar="RUN", help="Start when this run or sweep has finished."),
]
AfterAny = Annotated[
    list[str] | None,
    typer.Option("--after-any", metavar="RUN", help="Start when this run has ended in any way.", hidden=True),
]


def read_sweep(axes: list[str] | None, file: Path | None, max_parallel: int | None) -> Sequence[Override]:
    """Return the fields of the job that the options about a sweep set."""
    if not axes and file is None and max_parallel is None:
        return ()
    from hpcddp.jobfile.overrides import sweep_overrides

    return sweep_overrides(axes or (), file, max_parallel)


def wait_for(
    after: list[str] | None,
    after_any: list[str] | None,
    run_root: Path,
    environment: Mapping[str, str],
    *,
    cluster: Cluster = "slurm",
) -> str | None:
    """Return the value of sbatch's ``--dependency``, and print which runs have ended already.

    Args:
        after: the runs that must finish.
        after_any: the runs that must end in any way.
        run_root: the directory of all runs.
        environment: the submitter's environment.
        cluster: where the job goes.

    Raises:
        UserError: the job cannot wait for a run.
    """
    if not after and not after_any:
        return None
    if cluster == "local":
        raise UserError(
            "--after and --after-any are Slurm's, and this job runs here; submit it when the other run ends"
        )
    from hpcddp.submit.dependencies import dependency_on

    dependency = dependency_on(after or (), after_any or (), run_root, environment)
    for note in dependency.notes:
        typer.echo(note, err=True)
    return dependency.text


def print_sweep(submission: SweepSubmission, *, as_json: bool) -> None:
    """Print the output of ``submit`` about a sweep."""
    if as_json:
        typer.echo(json.dumps(submission.as_json(), indent=2))
        return
    if submission.dropped:
        typer.echo(f"not passed on, they would override the script: {', '.join(submission.dropped)}", err=True)
    for warning in submission.warnings:
        typer.echo(f"warning: {warning}", err=True)
    sweep = submission.sweep
    last = len(sweep.elements) - 1
    arrays = "a job array" if len(sweep.chunks) == 1 else f"{len(sweep.chunks)} job arrays"
    typer.echo(f"sweep id         {sweep.sweep_id}")
    typer.echo(f"runs             {last + 1}: {sweep.run_id(0)} ... {sweep.run_id(last)}")
    typer.echo(f"job id           {', '.join(chunk.job_id for chunk in sweep.chunks)}  ({arrays} on slurm)")
    typer.echo(f"sweep directory  {sweep.path}")
    typer.echo(f"next             {shlex.join(['hpcddp', 'status', word_for(sweep.path)])}")
