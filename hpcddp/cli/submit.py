"""``hpcddp submit``."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import sys
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcddp.cli.options import AsJson, JobFile, Overrides, profiles_directory

if TYPE_CHECKING:
    from hpcddp.launch.follow import JobState, Outcome
    from hpcddp.launch.submit import Submission
    from hpcddp.spec.job import JobSpec

_INTERRUPTED = 130


class ClusterChoice(StrEnum):
    """Where a job may go."""

    AUTO = "auto"
    SLURM = "slurm"
    LOCAL = "local"


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(submit)


def submit(
    job_file: JobFile,
    *,
    cluster: Annotated[
        ClusterChoice,
        typer.Option(help="slurm, local (this machine), or auto: Slurm where sbatch and a configuration are."),
    ] = ClusterChoice.AUTO,
    overrides: Overrides = None,
    template: Annotated[str | None, typer.Option(metavar="NAME|PATH", help="The sbatch template.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Stay and show progress until the run has ended.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be submitted; submit nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Submit a job to Slurm, or run it on this machine.

    Returns at once with the run's id and directory; with --follow it stays, through requeues, and exits 0 if the run
    finished and 1 otherwise.

    Example: hpcddp submit jobs/quickstart.yaml --cluster local --follow
    """
    from hpcddp.launch import submit as launch
    from hpcddp.spec.read import load_job

    environment = dict(os.environ)
    job = load_job(job_file, overrides=overrides or (), profiles=profiles_directory(environment))
    where = launch.choose_cluster(cluster.value, environment)
    run_id = launch.new_run_id(datetime.now().astimezone(), secrets.token_hex(2))
    python = job.spec.environment.python or sys.executable
    if dry_run:
        launch.check_submittable(job, where, environment)
        preview = launch.preview(job, cluster=where, run_id=run_id, python=python, template=template)
        _print_dry_run(preview, as_json=as_json)
        return
    submission = launch.submit(
        job, cluster=where, run_id=run_id, python=python, template=template, environment=environment
    )
    if not follow:
        _print_submission(submission, as_json=as_json)
        return
    _print_submission_line(submission)
    outcome = _follow(submission, job.spec)
    _print_outcome(submission, outcome, as_json=as_json)
    raise typer.Exit(0 if outcome.status == "finished" else 1)


def _print_dry_run(preview: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(preview, indent=2))
        return
    typer.echo(f"dry run: would go to {preview['cluster']}, run directory {preview['run_dir']}", err=True)
    typer.echo(preview["script"], nl=False)


def _print_submission(submission: Submission, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(submission.as_json(), indent=2))
        return
    _print_notes(submission)
    kind = "job" if submission.cluster == "slurm" else "process"
    typer.echo(f"run id         {submission.run.run_id}")
    typer.echo(f"job id         {submission.job_id}  ({kind} on {submission.cluster})")
    typer.echo(f"run directory  {submission.run.path}")
    logs = shlex.join([str(submission.run.batch_log), str(submission.run.metrics)])
    typer.echo(f"next           tail -F {logs}")


def _print_notes(submission: Submission) -> None:
    if submission.dropped:
        typer.echo(f"not passed on, they would override the script: {', '.join(submission.dropped)}", err=True)
    for warning in submission.warnings:
        typer.echo(f"warning: {warning}", err=True)


def _print_submission_line(submission: Submission) -> None:
    _print_notes(submission)
    typer.echo(f"run {submission.run.run_id}, job {submission.job_id} on {submission.cluster}", err=True)
    typer.echo(f"run directory {submission.run.path}", err=True)


def _follow(submission: Submission, spec: JobSpec) -> Outcome:
    from hpcddp.cli.progress import BarDisplay, PlainDisplay
    from hpcddp.launch.follow import follow
    from hpcddp.run.files import read_json

    steps = read_json(submission.run.plan)["steps_per_epoch"]
    epochs = spec.train.epochs if spec.train else 1
    try:
        if sys.stderr.isatty():
            with BarDisplay(steps, epochs) as bars:
                return follow(submission.run, bars, job_state=_job_state(submission))
        return follow(submission.run, PlainDisplay(steps, epochs), job_state=_job_state(submission))
    except KeyboardInterrupt:
        stop = f"scancel {submission.job_id}" if submission.cluster == "slurm" else f"kill {submission.job_id}"
        typer.echo(f"\nno longer following; run {submission.run.run_id} goes on. To end it: {stop}", err=True)
        raise typer.Exit(_INTERRUPTED) from None


def _job_state(submission: Submission) -> Any:  # noqa: ANN401
    """Return the question that ``follow`` asks: is the job still there?"""
    from hpcddp.launch import watch

    if submission.cluster == "slurm":
        return watch.SlurmWatch(submission.job_id)

    def local() -> JobState:
        return "ended" if submission.job.done() else "running"

    return local


def _print_outcome(submission: Submission, outcome: Outcome, *, as_json: bool) -> None:
    if as_json:
        document = {"status": outcome.status, "exit_code": outcome.exit_code, "result": outcome.result}
        typer.echo(json.dumps({**submission.as_json(), **document}, indent=2))
        return
    result = outcome.result or {}
    if outcome.status == "finished":
        typer.echo(
            f"finished: {result['steps']} steps, val_accuracy {result['val_accuracy']:.2%}, "
            f"{result['wall_s']:.1f} s on {result['world_size']} ranks"
        )
        typer.echo(f"result {submission.run.result}")
        return
    if outcome.status == "failed":
        typer.echo(f"failed with exit code {outcome.exit_code}: {result['reason']}")
    else:
        typer.echo("the job ended without a result: it was cancelled, killed or never started")
    typer.echo(f"the whole story: {submission.run.batch_log}")
