"""The command ``hpcddp submit``."""

from __future__ import annotations

import json
import os
import secrets
import shlex
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcddp.cli.boundary import INTERRUPTED
from hpcddp.cli.follow import follow_run
from hpcddp.cli.job_arguments import JobCommand, JobWords, takes_job_words
from hpcddp.cli.options import (
    RUN_ROOT,
    After,
    AfterAny,
    AsJson,
    JobFileOrNone,
    MaxParallel,
    Overrides,
    SweepFile,
    SweepOptions,
    complete_runs,
    default_run_root,
    read_sweep,
    run_argument,
    submit_request,
)
from hpcddp.cli.output import echo, warn, write
from hpcddp.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpcddp.jobfile.cluster import Cluster
    from hpcddp.manage.follow import Outcome
    from hpcddp.run.result import Result
    from hpcddp.submit.request import SubmitRequest
    from hpcddp.submit.submit import Submission
    from hpcddp.submit.sweep import SweepSubmission


class ClusterChoice(StrEnum):
    """The values of ``--cluster``."""

    AUTO = "auto"
    SLURM = "slurm"
    LOCAL = "local"


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(cls=JobCommand)(takes_job_words(submit))


def submit(  # noqa: PLR0913  each is an option
    job_file: JobFileOrNone = None,
    *,
    cluster: Annotated[
        ClusterChoice,
        typer.Option(metavar="auto|slurm|local", help="auto: Slurm if present."),
    ] = ClusterChoice.AUTO,
    overrides: Overrides = None,
    template: Annotated[str | None, typer.Option(metavar="NAME|PATH", help="The sbatch template.", hidden=True)] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="Continue this run: its id, or the start of it.",
            autocompletion=complete_runs,
        ),
    ] = None,
    axes: SweepOptions = None,
    sweep_file: SweepFile = None,
    max_parallel: MaxParallel = None,
    after: After = None,
    after_any: AfterAny = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait until the run has ended.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be submitted.")] = False,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the run id.", hidden=True)] = False,
    words: JobWords,
) -> None:
    """Submit a job to Slurm, or run it on this machine.

    Prints the run id and returns. --follow waits, through requeues, for the end: exit code 0 if finished, else 1.
    --resume continues an ended run.

    Example: hpcddp submit job.yaml --set learning_rate.base=0.2 --follow

    Example: hpcddp submit --nodes 2 --gpus-per-node 4 --time 2h -- python train.py

    Example: hpcddp submit job.yaml --sweep train.seed=0..4 --max-parallel 2

    Example: hpcddp submit --resume 20260314-1544
    """
    from hpcddp.submit.resume import resume as resume_run
    from hpcddp.submit.resume import resume_with_job
    from hpcddp.submit.submit import choose_cluster, new_run_id
    from hpcddp.submit.submit import submit as submit_new
    from hpcddp.submit.sweep_element import find_to_resume

    if quiet and (follow or dry_run or as_json):
        raise UserError("--quiet prints the run id and nothing else; leave it out, or --follow, --dry-run and --json")
    environment = dict(os.environ)
    # Only a run that is named has to be found.
    run_root = words.run_root or (default_run_root() if resume or after or after_any else RUN_ROOT)
    sweep = read_sweep(axes, sweep_file, max_parallel)
    unchanged = job_file is None and words.is_empty and not (overrides or sweep or template or dry_run)
    if resume is not None and unchanged and cluster is ClusterChoice.AUTO:
        dependency = _wait_for(after, after_any, run_root, environment)
        submission = resume_run(find_to_resume(resume, run_root), environment=environment, dependency=dependency)
    elif job_file is None and words.command is None:
        raise UserError(
            "no JOB is given; write a job file, a command after --, or --resume RUN alone to go on as it was"
        )
    else:
        job = words.load(job_file, overrides=overrides, sweep=sweep)
        chosen = choose_cluster(cluster.value, environment)
        request = submit_request(
            job,
            run_id=new_run_id(datetime.now().astimezone(), secrets.token_hex(2)),
            cluster=chosen,
            template=template,
            environment=environment,
            dependency=_wait_for(after, after_any, run_root, environment, cluster=chosen),
        )
        if dry_run:
            _print_preview(request, resume, run_root, as_json=as_json)
            return
        if resume is not None:
            submission = resume_with_job(find_to_resume(resume, run_root), request)
        elif job.spec.sweep is not None:
            _submit_sweep(request, follow=follow, as_json=as_json, quiet=quiet)
            return
        else:
            submission = submit_new(request)
    if quiet:
        echo(submission.run.run_id)
        return
    if not follow:
        _print_submission(submission, as_json=as_json)
        return
    _print_submission_line(submission)
    outcome = follow_run(submission)
    _print_outcome(submission, outcome, as_json=as_json)
    raise typer.Exit(_exit_code(outcome))


def _submit_sweep(request: SubmitRequest, *, follow: bool, as_json: bool, quiet: bool) -> None:
    from hpcddp.submit.sweep import submit_sweep

    if follow:
        raise UserError("--follow stays with one run, and a sweep is many; leave it out, and see: hpcddp status SWEEP")
    submission = submit_sweep(request)
    if quiet:
        echo(submission.sweep.sweep_id)
        return
    _print_sweep(submission, as_json=as_json)


def _print_preview(request: SubmitRequest, resume: str | None, run_root: Path, *, as_json: bool) -> None:
    from hpcddp.run.find import find_run
    from hpcddp.submit.resume import job_of_run
    from hpcddp.submit.submit import prepare
    from hpcddp.submit.sweep_element import checked_run

    if resume is not None:
        run = checked_run(find_run(resume, run_root))
        request = replace(request, run_id=run.run_id, job=job_of_run(run, request.job))
    prepared = prepare(request)
    for warning in prepared.notes:
        warn(warning)
    _print_dry_run(prepared.as_json(), as_json=as_json)


def _print_dry_run(preview: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        echo(json.dumps(preview, indent=2))
        return
    runs = f"{len(preview['elements'])} runs, their sweep" if "elements" in preview else "run"
    echo(f"dry run: would go to {preview['cluster']}, {runs} directory {preview['run_dir']}", err=True)
    write(preview["script"], nl=False)


def _print_submission(submission: Submission, *, as_json: bool) -> None:
    if as_json:
        echo(json.dumps(submission.as_json(), indent=2))
        return
    _print_notes(submission)
    kind = "job" if submission.cluster == "slurm" else "process"
    echo(f"run id         {submission.run.run_id}")
    echo(f"job id         {submission.job_id}  ({kind} on {submission.cluster})")
    echo(f"run directory  {submission.run.path}")
    echo(f"next           {shlex.join(['hpcddp', 'logs', str(submission.run.path), '--follow'])}")


def _print_notes(submission: Submission) -> None:
    if submission.dropped:
        echo(f"not passed on, they would override the script: {', '.join(submission.dropped)}", err=True)
    for warning in submission.warnings:
        warn(warning)


def _print_submission_line(submission: Submission) -> None:
    _print_notes(submission)
    echo(f"run {submission.run.run_id}, job {submission.job_id} on {submission.cluster}", err=True)
    echo(f"run directory {submission.run.path}", err=True)


def _exit_code(outcome: Outcome) -> int:
    """Return the command's exit code: 0 finished, 130 ended by its user, 1 anything else."""
    return {"finished": 0, "cancelled": INTERRUPTED}.get(outcome.status, 1)


def _facts(result: Result) -> Iterator[str]:
    """Yield what a result says in a line; a program of the user's own says less."""
    if result.steps is not None:
        yield f"{result.steps} steps"
    if result.val_accuracy is not None:
        yield f"val_accuracy {result.val_accuracy:.2%}"
    if result.wall_s is not None:
        yield f"{result.wall_s:.1f} s on {result.world_size} ranks"


def _print_outcome(submission: Submission, outcome: Outcome, *, as_json: bool) -> None:
    result = outcome.result
    if as_json:
        document = {
            "status": outcome.status,
            "exit_code": outcome.exit_code,
            "result": result.as_json() if result else None,
        }
        echo(json.dumps({**submission.as_json(), **document}, indent=2))
        return
    if result is None:
        echo("the job ended without a result: it was cancelled, killed or never started")
    elif outcome.status == "finished":
        echo(f"finished: {', '.join(_facts(result))}")
        echo(f"result {submission.run.result}")
        return
    elif outcome.status == "failed":
        echo(f"failed with exit code {outcome.exit_code}: {result.reason}")
    else:
        saved = f"; step {result.saved_step} is saved" if result.saved_step else ""
        echo(f"{outcome.status}: {result.reason}{saved}")
    if result is not None and result.resume:
        echo(f"to go on: {result.resume}")
    echo(f"the whole story: {submission.run.batch_log}")


def _wait_for(
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
        echo(note, err=True)
    return dependency.text


def _print_sweep(submission: SweepSubmission, *, as_json: bool) -> None:
    """Print the output of ``submit`` about a sweep."""
    if as_json:
        echo(json.dumps(submission.as_json(), indent=2))
        return
    if submission.dropped:
        echo(f"not passed on, they would override the script: {', '.join(submission.dropped)}", err=True)
    for warning in submission.warnings:
        warn(warning)
    sweep = submission.sweep
    last = len(sweep.elements) - 1
    arrays = "a job array" if len(sweep.chunks) == 1 else f"{len(sweep.chunks)} job arrays"
    echo(f"sweep id         {sweep.sweep_id}")
    echo(f"runs             {last + 1}: {sweep.run_id(0)} ... {sweep.run_id(last)}")
    echo(f"job id           {', '.join(chunk.job_id for chunk in sweep.chunks)}  ({arrays} on slurm)")
    echo(f"sweep directory  {sweep.path}")
    echo(f"next             {shlex.join(['hpcddp', 'status', run_argument(sweep.path)])}")
