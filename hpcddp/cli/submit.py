"""``hpcddp submit``."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import sys
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcddp.cli.boundary import INTERRUPTED
from hpcddp.cli.following import follow_run
from hpcddp.cli.job_words import JobCommand, JobWords, takes_job_words
from hpcddp.cli.options import RUN_ROOT, AsJson, JobFileOrNone, Overrides, complete_runs, run_root_here
from hpcddp.cli.sweeping import After, AfterAny, Axes, MaxParallel, SweepFile, read_sweep, submit_sweep, wait_for
from hpcddp.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hpcddp.launch.follow import Outcome
    from hpcddp.launch.submission import Cluster, Submission
    from hpcddp.spec.read import ResolvedJob


class ClusterChoice(StrEnum):
    """Where a job may go."""

    AUTO = "auto"
    SLURM = "slurm"
    LOCAL = "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the command line asks for.

    Args:
        job: the job.
        cluster: where it goes.
        python: the interpreter of its tasks.
        template: its script's template.
    """

    job: ResolvedJob
    cluster: Cluster
    python: str
    template: str | None


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(cls=JobCommand)(takes_job_words(submit))


def submit(  # noqa: PLR0913  each is an option
    job_file: JobFileOrNone = None,
    *,
    cluster: Annotated[
        ClusterChoice,
        typer.Option(metavar="auto|slurm|local", help="auto: Slurm where it is."),
    ] = ClusterChoice.AUTO,
    overrides: Overrides = None,
    template: Annotated[str | None, typer.Option(metavar="NAME|PATH", help="The sbatch template.", hidden=True)] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="Continue this run: its id, or the beginning.",
            autocompletion=complete_runs,
        ),
    ] = None,
    run_root: Annotated[Path | None, typer.Option(metavar="DIR", help="Where runs live.", hidden=True)] = None,
    axes: Axes = None,
    sweep_file: SweepFile = None,
    max_parallel: MaxParallel = None,
    after: After = None,
    after_any: AfterAny = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Stay until the run has ended.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be submitted.")] = False,
    as_json: AsJson = False,
    words: JobWords,
) -> None:
    """Submit a job to Slurm, or run it on this machine.

    Returns at once with the run's id and directory; with --follow it stays, through requeues, and exits 0 if the run
    finished and 1 otherwise. --resume continues a run that has ended early, from its newest checkpoint.

    Example: hpcddp submit job.yaml --set learning_rate.base=0.2 --follow

    Example: hpcddp submit --nodes 2 --gpus-per-node 4 --time 2h -- python train.py

    Example: hpcddp submit job.yaml --sweep train.seed=0..4 --max-parallel 2

    Example: hpcddp submit --resume 20260314-1544
    """
    environment = dict(os.environ)
    # Only who names a run looks for one.
    run_root = run_root or (run_root_here() if resume or after or after_any else RUN_ROOT)
    sweep = read_sweep(axes, sweep_file, max_parallel)
    unchanged = job_file is None and words.is_empty and not (overrides or sweep or template or dry_run)
    if resume is not None and unchanged and cluster is ClusterChoice.AUTO:
        waits = wait_for(after, after_any, run_root, environment)
        submission = _resume(resume, run_root, environment, waits)
    elif job_file is None and words.command is None:
        raise UserError(
            "no JOB is given; write a job file, a command after --, or --resume RUN alone to go on as it was"
        )
    else:
        job = words.load(job_file, overrides=overrides, sweep=sweep)
        order = _order(job, cluster, template, environment)
        waits = wait_for(after, after_any, run_root, environment, cluster=order.cluster)
        if dry_run:
            _print_preview(order, resume, run_root, environment, as_json=as_json)
            return
        if order.job.spec.sweep is not None and resume is None:
            submit_sweep(order, _run_id(None, run_root), environment, waits, follow=follow, as_json=as_json)
            return
        submission = _hand_over(order, resume, run_root, environment, waits)
    if not follow:
        _print_submission(submission, as_json=as_json)
        return
    _print_submission_line(submission)
    outcome = follow_run(submission)
    _print_outcome(submission, outcome, as_json=as_json)
    raise typer.Exit(_exit_code(outcome))


def _order(job: ResolvedJob, cluster: ClusterChoice, template: str | None, environment: Mapping[str, str]) -> Order:
    from hpcddp.launch.submit import choose_cluster

    where = choose_cluster(cluster.value, environment)
    return Order(job=job, cluster=where, python=job.spec.environment.python or sys.executable, template=template)


def _run_id(resume: str | None, run_root: Path) -> str:
    """Return the id of the run to resume, or a new one."""
    from hpcddp.launch.submit import new_run_id
    from hpcddp.run.find import find_run

    if resume is not None:
        return find_run(resume, run_root).run_id
    return new_run_id(datetime.now().astimezone(), secrets.token_hex(2))


def _hand_over(
    order: Order, resume: str | None, run_root: Path, environment: Mapping[str, str], waits: str | None
) -> Submission:
    """Submit a new run, or continue one with this job."""
    from hpcddp.launch.element import find_to_resume
    from hpcddp.launch.resume import resume_anew
    from hpcddp.launch.submit import submit as submit_new

    if resume is None:
        return submit_new(
            order.job,
            cluster=order.cluster,
            run_id=_run_id(None, run_root),
            python=order.python,
            template=order.template,
            environment=environment,
            dependency=waits,
        )
    return resume_anew(
        find_to_resume(resume, run_root),
        order.job,
        cluster=order.cluster,
        python=order.python,
        template=order.template,
        environment=environment,
        dependency=waits,
    )


def _resume(resume: str, run_root: Path, environment: Mapping[str, str], waits: str | None) -> Submission:
    """Continue a run as it is."""
    from hpcddp.launch.element import find_to_resume
    from hpcddp.launch.resume import resume as resume_run

    return resume_run(find_to_resume(resume, run_root), environment=environment, dependency=waits)


def _print_preview(
    order: Order, resume: str | None, run_root: Path, environment: Mapping[str, str], *, as_json: bool
) -> None:
    from hpcddp.launch.resume import job_of_run
    from hpcddp.launch.site_rules import check_site
    from hpcddp.launch.submit import preview
    from hpcddp.launch.submittable import check_submittable
    from hpcddp.launch.sweep_checks import check_sweep_submittable
    from hpcddp.run.find import find_run

    job, run_id = order.job, _run_id(resume, run_root)
    if resume is not None:
        job = job_of_run(find_run(resume, run_root), job)
    check = check_submittable if job.spec.sweep is None else check_sweep_submittable
    for warning in check(job.spec, order.cluster, environment):
        typer.echo(f"warning: {warning}", err=True)
    check_site(job, order.cluster, environment)
    document = preview(job, cluster=order.cluster, run_id=run_id, python=order.python, template=order.template)
    _print_dry_run(document, as_json=as_json)


def _print_dry_run(preview: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(preview, indent=2))
        return
    runs = f"{len(preview['elements'])} runs, their sweep" if "elements" in preview else "run"
    typer.echo(f"dry run: would go to {preview['cluster']}, {runs} directory {preview['run_dir']}", err=True)
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
    typer.echo(f"next           {shlex.join(['hpcddp', 'logs', str(submission.run.path), '--follow'])}")


def _print_notes(submission: Submission) -> None:
    if submission.dropped:
        typer.echo(f"not passed on, they would override the script: {', '.join(submission.dropped)}", err=True)
    for warning in submission.warnings:
        typer.echo(f"warning: {warning}", err=True)


def _print_submission_line(submission: Submission) -> None:
    _print_notes(submission)
    typer.echo(f"run {submission.run.run_id}, job {submission.job_id} on {submission.cluster}", err=True)
    typer.echo(f"run directory {submission.run.path}", err=True)


def _exit_code(outcome: Outcome) -> int:
    """Return the command's exit code: 0 finished, 130 ended by its user, 1 anything else."""
    return {"finished": 0, "cancelled": INTERRUPTED}.get(outcome.status, 1)


def _facts(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a result says in a line; a program of the user's own says less."""
    if "steps" in result:
        yield f"{result['steps']} steps"
    if result.get("val_accuracy") is not None:
        yield f"val_accuracy {result['val_accuracy']:.2%}"
    yield f"{result['wall_s']:.1f} s on {result['world_size']} ranks"


def _print_outcome(submission: Submission, outcome: Outcome, *, as_json: bool) -> None:
    if as_json:
        document = {"status": outcome.status, "exit_code": outcome.exit_code, "result": outcome.result}
        typer.echo(json.dumps({**submission.as_json(), **document}, indent=2))
        return
    result = outcome.result or {}
    if outcome.status == "finished":
        typer.echo(f"finished: {', '.join(_facts(result))}")
        typer.echo(f"result {submission.run.result}")
        return
    if outcome.status == "failed":
        typer.echo(f"failed with exit code {outcome.exit_code}: {result['reason']}")
    elif outcome.status == "lost":
        typer.echo("the job ended without a result: it was cancelled, killed or never started")
    else:
        saved = f"; step {result['saved_step']} is saved" if result.get("saved_step") else ""
        typer.echo(f"{outcome.status}: {result['reason']}{saved}")
    if result.get("resume"):
        typer.echo(f"to go on: {result['resume']}")
    typer.echo(f"the whole story: {submission.run.batch_log}")
