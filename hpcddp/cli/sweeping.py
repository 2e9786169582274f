"""What ``submit`` and ``render`` have for sweeps: their options, and what is printed about one."""

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

    from hpcddp.cli.submit import Order
    from hpcddp.launch.submission import Cluster
    from hpcddp.launch.sweeping import SweepSubmission
    from hpcddp.spec.overrides import Override

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
    """Return what the options about a sweep say about the job."""
    if not axes and file is None and max_parallel is None:
        return ()
    from hpcddp.spec.sweep_options import sweep_overrides

    return sweep_overrides(axes or (), file, max_parallel)


def wait_for(
    after: list[str] | None,
    after_any: list[str] | None,
    run_root: Path,
    environment: Mapping[str, str],
    *,
    cluster: Cluster = "slurm",
) -> str | None:
    """Return what a job waits for, in sbatch's words, and say which runs need not be waited for.

    Args:
        after: the runs that must finish.
        after_any: the runs that must end.
        run_root: where runs live.
        environment: the submitter's environment.
        cluster: where the job goes.

    Raises:
        UserError: a run cannot be waited for.
    """
    if not after and not after_any:
        return None
    if cluster == "local":
        raise UserError(
            "--after and --after-any are Slurm's, and this job runs here; submit it when the other run ends"
        )
    from hpcddp.launch.dependencies import dependency_on

    dependency = dependency_on(after or (), after_any or (), run_root, environment)
    for note in dependency.notes:
        typer.echo(note, err=True)
    return dependency.text


def submit_sweep(
    order: Order, sweep_id: str, environment: Mapping[str, str], waits: str | None, *, follow: bool, as_json: bool
) -> None:
    """Submit all runs of a sweep, and say where they went.

    Args:
        order: what the command line asks for.
        sweep_id: the id of the new sweep.
        environment: the submitter's environment.
        waits: what it waits for, in sbatch's words; None waits for nothing.
        follow: whether the user wants to stay.
        as_json: whether to print JSON.

    Raises:
        HpcddpError: the sweep cannot be submitted, or not be followed.
    """
    from hpcddp.launch.sweeping import submit_sweep as submit_all

    if follow:
        raise UserError("--follow stays with one run, and a sweep is many; leave it out, and see: hpcddp status SWEEP")
    submission = submit_all(
        order.job,
        cluster=order.cluster,
        sweep_id=sweep_id,
        python=order.python,
        template=order.template,
        environment=environment,
        dependency=waits,
    )
    print_sweep(submission, as_json=as_json)


def print_sweep(submission: SweepSubmission, *, as_json: bool) -> None:
    """Print what ``submit`` says about a sweep."""
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
