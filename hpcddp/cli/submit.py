"""The command ``hpcddp submit``."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcddp.api import default_run_root, request_to_submit
from hpcddp.cli.boundary import INTERRUPTED
from hpcddp.cli.command_words import JobCommand, job_arguments
from hpcddp.cli.follow import follow_run
from hpcddp.cli.job_arguments import JobArguments
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
    read_sweep_options,
    run_argument,
    short_argument,
)
from hpcddp.cli.output import echo, sentences, warn, write
from hpcddp.errors import UserError, counted
from hpcddp.slurm.job_environment import NO_DEPENDENCY, Dependency

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpcddp.jobfile.cluster import Cluster
    from hpcddp.jobfile.overrides import Override
    from hpcddp.manage.follow import Outcome
    from hpcddp.manage.overview import SweepStatus
    from hpcddp.run.directory import RunDirectory
    from hpcddp.run.result import Result
    from hpcddp.run.sweep import Sweep
    from hpcddp.submission.request import CodeChoice, SubmitRequest
    from hpcddp.submission.resume_sweep import SweepResumption
    from hpcddp.submission.submit import Submission
    from hpcddp.submission.sweep import SweepSubmission


class CodeOption(StrEnum):
    """The values of ``--code``."""

    NOW = "now"
    SUBMITTED = "submitted"


class ClusterChoice(StrEnum):
    """The values of ``--cluster``."""

    AUTO = "auto"
    SLURM = "slurm"
    LOCAL = "local"
    HERE = "here"


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(cls=JobCommand)(submit)


def submit(  # noqa: PLR0913  each is an option
    context: typer.Context,
    job_file: JobFileOrNone = None,
    *,
    cluster: Annotated[
        ClusterChoice,
        typer.Option(metavar="WHERE", help="auto|slurm|local|here (in salloc)."),
    ] = ClusterChoice.AUTO,
    overrides: Overrides = None,
    template: Annotated[
        str | None, typer.Option(metavar="NAME|PATH", help="Template of the script: docs/templates.md.", hidden=True)
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="Continue this ended run, or the rest of this sweep.",
            autocompletion=complete_runs,
        ),
    ] = None,
    code: Annotated[
        CodeOption | None,
        typer.Option(metavar="WHICH", help="now|submitted: the code with which --resume goes on.", hidden=True),
    ] = None,
    axes: SweepOptions = None,
    sweep_file: SweepFile = None,
    max_parallel: MaxParallel = None,
    after: After = None,
    after_any: AfterAny = None,
    chain: Annotated[
        int | None,
        typer.Option(metavar="N", min=2, max=50, help="N jobs for one run, without requeue."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait until the run has ended.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the script; submit nothing.")] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Submit although something is missing on this machine.", hidden=True),
    ] = False,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the run id.", hidden=True)] = False,
) -> None:
    """Submit a job to Slurm, or run it on this machine.

    Prints the run id. --follow waits for the end: exit code 0 if finished, 130 if cancelled, else 1. --resume
    continues a run; options change its job.

    Example: hpcddp submit job.yaml --set learning_rate.base=0.2 --follow

    Example: hpcddp submit --nodes 2 --gpus-per-node 4 --cpus-per-task 8 -- python train.py

    Example: hpcddp submit --sweep lr=0.1,0.2 --max-parallel 2 -- python train.py --lr {lr}

    Example: hpcddp submit --resume 20260314-1544
    """
    from hpcddp.run.sweep import read_sweep
    from hpcddp.submission.interrupts import tells_interruption
    from hpcddp.submission.resume import request_to_resume
    from hpcddp.submission.resume import resume as resume_run
    from hpcddp.submission.submit import submit as submit_new

    output = _Output(follow=follow, quiet=quiet, as_json=as_json)
    _refuse_contradictions(output, code, resume, chain, dry_run=dry_run)
    code_choice: CodeChoice | None = None if code is None else code.value
    arguments = job_arguments(context)
    environment = dict(os.environ)
    names_a_run = resume or after or after_any
    # Only a run that is named has to be found.
    run_root = arguments.run_root or (default_run_root() if names_a_run else RUN_ROOT)
    sweep = read_sweep_options(axes, sweep_file, max_parallel)
    run = None if resume is None else _find(resume, run_root, named=arguments.run_root is not None, dry_run=dry_run)
    is_same_job = job_file is None and arguments.is_empty and not (overrides or sweep)
    submitted_sweep = None
    if run is not None and is_same_job and template is None and cluster is ClusterChoice.AUTO:
        submitted_sweep = read_sweep(run.path)
    if submitted_sweep is not None:
        request = request_to_resume(submitted_sweep.directory, environment=environment)
        dependency = _wait_for(after, after_any, run_root, environment, cluster=request.cluster)
        request = replace(request, dependency=dependency, force=force, code=code_choice, chain=chain)
        _resume_sweep(submitted_sweep, request, output, dry_run=dry_run)
        return
    with tells_interruption():
        request = _request_of(run, job_file, arguments, cluster, template, overrides, sweep, environment)
        dependency = _wait_for(after, after_any, run_root, environment, cluster=request.cluster)
        request = replace(request, dependency=dependency, force=force, code=code_choice, chain=chain)
        # Who interrupts the command after the submission has to know its run id: nothing slow comes before that is
        # printed.
        findings = [] if run is not None or quiet else _findings(job_file, request)
    submission: Submission | None = None
    if dry_run:
        _print_preview(request, run, as_json=as_json)
    elif run is not None:
        submission = resume_run(run, request)
    elif request.job.spec.sweep is not None:
        _submit_sweep(request, output)
    else:
        submission = submit_new(request)
    # A job that is refused gets the one sentence about that.
    for finding in findings:
        sentences("check:", "waiting", finding)
    if submission is not None:
        _show(submission, output)


def _refuse_contradictions(
    output: _Output, code: CodeOption | None, resume: str | None, chain: int | None, *, dry_run: bool
) -> None:
    if chain is not None and output.follow:
        raise UserError(
            "--follow shows one job, and a chain has several; leave it out, then: hpcddp logs last --follow"
        )
    if output.quiet and (output.follow or dry_run or output.as_json):
        raise UserError("--quiet prints the run id and nothing else; leave it out, or --follow, --dry-run and --json")
    if code is not None and resume is None:
        raise UserError("--code says with which code a run is resumed, and a new run has the code of now; leave it out")


def _findings(job_file: Path | None, request: SubmitRequest) -> list[str]:
    """Return what ``hpcddp check`` finds at once, a line each; the job is submitted all the same."""
    from hpcddp.check.search import check_in_short

    return [finding.in_short for finding in check_in_short(job_file, request)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Output:
    """The options that say what ``submit`` prints."""

    follow: bool
    quiet: bool
    as_json: bool


def _request_of(
    run: RunDirectory | None,
    job_file: Path | None,
    arguments: JobArguments,
    cluster: ClusterChoice,
    template: str | None,
    overrides: list[str] | None,
    sweep: Sequence[Override],
    environment: Mapping[str, str],
) -> SubmitRequest:
    """Return the request of a job file or a command, or that of a run whose job the options change."""
    from hpcddp.submission.resume import request_to_resume
    from hpcddp.submission.submit import choose_cluster, new_run_id

    if run is None and job_file is None and arguments.command is None:
        raise UserError("no JOB is given; write a job file, a command after --, or --resume RUN to continue a run")
    if run is not None and job_file is None:
        change = None
        if not arguments.is_empty or overrides or sweep:
            change = partial(arguments.change, run=run, overrides=overrides, sweep=sweep)
        # Without a choice, it goes where it went before.
        chosen = None if cluster.value == "auto" else choose_cluster(cluster.value, environment)
        return request_to_resume(run, change, environment=environment, cluster=chosen, template=template)
    return request_to_submit(
        arguments.load(job_file, overrides=overrides, sweep=sweep),
        run_id=new_run_id(datetime.now().astimezone(), os.urandom(2).hex()),
        cluster=choose_cluster(cluster.value, environment),
        template=template,
        environment=environment,
    )


def _show(submission: Submission, output: _Output) -> None:
    """Print what was submitted, and follow it if that is asked for."""
    if output.quiet:
        echo(submission.run.run_id)
        return
    if not output.follow:
        _print_submission(submission, as_json=output.as_json)
        return
    _print_submission_line(submission)
    outcome = follow_run(submission)
    print_outcome(submission, outcome, as_json=output.as_json)
    raise typer.Exit({"finished": 0, "cancelled": INTERRUPTED}.get(outcome.status, 1))


_NOT_FOLLOWED = "--follow shows one run, and a sweep has many; leave it out, and see: hpcddp status SWEEP"


def _resume_sweep(sweep: Sweep, request: SubmitRequest, output: _Output, *, dry_run: bool) -> None:
    """Continue the elements of a sweep that have ended and not finished; in a dry run print which these are."""
    from hpcddp.manage.overview import sweep_status_now
    from hpcddp.submission.resume_sweep import prepare_sweep, resume_sweep

    if output.follow:
        raise UserError(_NOT_FOLLOWED)
    status, unanswered = sweep_status_now(sweep, request.environment)
    indices = status.elements_to_resume(unanswered)
    if dry_run:
        notes = prepare_sweep(sweep, request).notes
        run_ids = [sweep.run_id(index) for index in indices]
        _print_preview_of_resumed_sweep(status, run_ids, notes, request.cluster, as_json=output.as_json)
        return
    resumed = resume_sweep(sweep, indices, request)
    if output.quiet:
        echo(sweep.sweep_id)
    else:
        _print_resumed_sweep(status, resumed, as_json=output.as_json)


def _print_preview_of_resumed_sweep(
    status: SweepStatus, run_ids: Sequence[str], notes: Iterable[str], cluster: Cluster, *, as_json: bool
) -> None:
    """Print which elements of a sweep would continue.

    Args:
        status: the state of the sweep, before the resumption.
        run_ids: the ids of these elements.
    """
    sweep = status.sweep
    if as_json:
        document = {
            "sweep_id": sweep.sweep_id,
            "sweep_dir": str(sweep.path),
            "cluster": cluster,
            "elements": [{"run_id": run_id} for run_id in run_ids],
            "finished": status.count_finished,
            "alive": status.count_alive,
        }
        echo(json.dumps(document, indent=2))
        return
    _print_remarks((), notes)
    count = counted(len(run_ids), "element")
    echo(f"dry run: would go to {cluster}, {count} of sweep directory {sweep.path}; {status.rest}", err=True)
    echo("\n".join(run_ids))


def _print_resumed_sweep(status: SweepStatus, resumed: SweepResumption, *, as_json: bool) -> None:
    """Print which elements of a sweep continue.

    Args:
        status: the state of the sweep, before the resumption.
    """
    if as_json:
        document = {**resumed.as_json(), "finished": status.count_finished, "alive": status.count_alive}
        echo(json.dumps(document, indent=2))
        return
    _print_remarks(resumed.dropped, resumed.warnings)
    count = len(resumed.jobs)
    verb = "continues" if count == 1 else "continue"
    echo(f"{counted(count, 'element')} {verb}; {status.rest}")
    echo(f"job id           {_first_words(resumed.job_ids)}")
    sweep = status.sweep
    echo(f"sweep directory  {sweep.path}")
    _print_copy("code             ", sweep.directory)
    echo(f"next             {shlex.join(['hpcddp', 'status', run_argument(sweep.path)])}")


_LISTED = 5


def _first_words(words: Sequence[str]) -> str:
    """Return a list in words; of a long one, the first words and how many there are more."""
    more = f" and {len(words) - _LISTED} more" if len(words) > _LISTED else ""
    return f"{', '.join(words[:_LISTED])}{more}"


def _submit_sweep(request: SubmitRequest, output: _Output) -> None:
    from hpcddp.submission.sweep import submit_sweep

    if output.follow:
        raise UserError(_NOT_FOLLOWED)
    submission = submit_sweep(request)
    if output.quiet:
        echo(submission.sweep.sweep_id)
        return
    _print_sweep(submission, as_json=output.as_json)


def _find(text: str, run_root: Path, *, named: bool, dry_run: bool) -> RunDirectory:
    """Return the run to resume; a dry run makes no directory for an element of a sweep that never began.

    Raises:
        UserError: there is no such run, or it is not under a run root that the command line names.
    """
    from hpcddp.run.find import find_run
    from hpcddp.submission.sweep_element import checked_run, find_to_resume

    run = checked_run(find_run(text, run_root))
    # An id or a path is found under every root.
    if named and run.run_root.resolve() != run_root.resolve():
        raise UserError(
            f"--run-root is {run_root}, and the run {run.run_id} is in {run.run_root}, where it continues; leave "
            "--run-root out"
        )
    return run if dry_run else find_to_resume(str(run.path), run_root)


def _print_preview(request: SubmitRequest, run: RunDirectory | None, *, as_json: bool) -> None:
    """Print what would be submitted: a new run, or a resumption of ``run``."""
    from hpcddp.jobfile.placeholders import argument_text
    from hpcddp.manage.format import one_line
    from hpcddp.submission.code import take_code
    from hpcddp.submission.resume import prepare_resumption
    from hpcddp.submission.submit import prepare

    consequences: Sequence[str] = ()
    if run is None:
        prepared = prepare(request)
        take_code(request)
    else:
        resumption = prepare_resumption(run, request)
        prepared = resumption.job
        consequences = resumption.consequences
    for warning in prepared.notes:
        warn(warning)
    _print_changes(consequences)
    preview = prepared.as_json()
    if as_json:
        changes = {"changes": list(consequences)} if consequences else {}
        echo(json.dumps({**preview, **changes}, indent=2))
        return
    place = "this allocation" if preview["cluster"] == "here" else preview["cluster"]
    if request.chain is not None:
        place = f"{place} as {request.chain} jobs in turn"
    elements = preview.get("elements", ())
    directory = "run directory"
    if "elements" in preview:
        directory = f"{counted(len(elements), 'run')}, sweep directory"
    echo(f"dry run: would go to {place}, {directory} {preview['run_dir']}", err=True)
    for index, values in enumerate(elements[:_PREVIEWED]):
        texts = " ".join(f"{key}={argument_text(value)}" for key, value in values.items())
        echo(f"run {index}: {one_line(texts)}", err=True)
    if len(elements) > _PREVIEWED:
        echo(f"and {len(elements) - _PREVIEWED} more", err=True)
    write(preview["script"], nl=False)


_PREVIEWED = 20
"""How many runs of a sweep a dry run names."""


_PLACES: dict[Cluster, str] = {
    "slurm": "job on slurm",
    "local": "process on local",
    "here": "process, its tasks in this allocation",
}


def _print_submission(submission: Submission, *, as_json: bool) -> None:
    from hpcddp.run.job_records import chain_of

    if as_json:
        echo(json.dumps(submission.as_json(), indent=2))
        return
    _print_notes(submission)
    echo(f"run id         {submission.run.run_id}")
    job_ids = ", ".join(chain_of(submission.run)) or submission.job_id
    echo(f"job id         {job_ids}  ({_PLACES[submission.cluster]})")
    echo(f"run directory  {submission.run.path}")
    _print_copy("code           ", submission.run)
    echo(f"next           {shlex.join(['hpcddp', 'logs', short_argument(submission.run), '--follow'])}")


def _print_copy(label: str, run: RunDirectory) -> None:
    """Print where the copy of the code of a run or a sweep is, if there is one."""
    from hpcddp.run.code import read_code

    code = read_code(run)
    if code is not None and code.copy is not None:
        echo(f"{label}copied to {code.copy}")


def _print_changes(consequences: Sequence[str]) -> None:
    for sentence in consequences:
        echo(f"change: {sentence}", err=True)


def _print_notes(submission: Submission) -> None:
    _print_changes(submission.consequences)
    _print_remarks(submission.dropped, submission.warnings)


def _print_remarks(dropped: Sequence[str], warnings: Iterable[str]) -> None:
    if dropped:
        echo(f"not passed on, they would override the script: {', '.join(dropped)}", err=True)
    for warning in warnings:
        warn(warning)


def _print_submission_line(submission: Submission) -> None:
    _print_notes(submission)
    place = f"job {submission.job_id} on {submission.cluster}"
    if submission.cluster == "here":
        place = f"process {submission.job_id}, its tasks in this allocation"
    echo(f"run {submission.run.run_id}, {place}", err=True)
    echo(f"run directory {submission.run.path}", err=True)


def _facts(result: Result) -> Iterator[str]:
    """Yield what a result says in a line; a program of the user's own says less."""
    if result.steps is not None:
        yield counted(result.steps, "step")
    if result.val_accuracy is not None:
        yield f"val_accuracy {result.val_accuracy:.2%}"
    if result.wall_s is not None:
        # A training counts its own time, a command the time of its attempts.
        what = "" if result.steps is None else " of training"
        attempts = f" in {result.attempts} attempts" if (result.attempts or 1) > 1 else ""
        yield f"{result.wall_s:.1f} s{what}{attempts} on {counted(result.world_size or 1, 'rank')}"


def print_outcome(submission: Submission, outcome: Outcome, *, as_json: bool) -> None:
    """Print how a followed run ended, and what to do next."""
    from hpcddp.manage.overview import status_now
    from hpcddp.manage.why import explain

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
        why = explain(status_now(submission.run, os.environ)).why
        echo(f"the job ended without a result: {why}")
        echo(f"more: {shlex.join(['hpcddp', 'why', short_argument(submission.run)])}")
    elif outcome.status == "finished":
        echo(f"finished: {', '.join(_facts(result))}")
        echo(f"result {submission.run.result}")
        return
    else:
        echo(_unfinished_sentence(outcome, result))
        if result.resume:
            _print_way_on(submission.run, result)
    echo(f"the whole story: {submission.run.batch_log}")


def _unfinished_sentence(outcome: Outcome, result: Result) -> str:
    """Return how a run ended that has not finished."""
    if outcome.status == "failed":
        return f"failed with exit code {outcome.exit_code}: {result.reason}"
    sentence: str = outcome.status
    if not str(result.reason).startswith(outcome.status):
        sentence += f": {result.reason}"
    if result.saved_step:
        sentence += f"; step {result.saved_step} is saved"
    return sentence


def _print_way_on(run: RunDirectory, result: Result) -> None:
    """Print the command that resumes a run; before it, the command that shows the error that must be removed first."""
    from hpcddp.manage.why import remedy

    command, later = remedy(run, result, short_argument(run))
    if later is None:
        echo(f"to go on: {command}")
    else:
        echo(f"the error: {command}")
        echo(f"when its cause is removed, resume with: {later}")


def _wait_for(
    after: list[str] | None,
    after_any: list[str] | None,
    run_root: Path,
    environment: Mapping[str, str],
    *,
    cluster: Cluster,
) -> Dependency:
    """Return what the job waits for, and print which runs have ended already.

    Args:
        after: the runs that must finish.
        after_any: the runs that must end in any way.
        run_root: the directory of all runs.

    Raises:
        UserError: the job cannot wait for a run.
    """
    if not after and not after_any:
        return NO_DEPENDENCY
    if cluster != "slurm":
        raise UserError(
            "--after and --after-any are Slurm's, and this job runs here; submit it when the other run ends"
        )
    from hpcddp.submission.dependencies import dependency_on

    dependency, notes = dependency_on(after or (), after_any or (), run_root, environment)
    for note in notes:
        echo(note, err=True)
    return dependency


def _print_sweep(submission: SweepSubmission, *, as_json: bool) -> None:
    """Print the output of ``submit`` about a sweep."""
    if as_json:
        echo(json.dumps(submission.as_json(), indent=2))
        return
    _print_remarks(submission.dropped, submission.warnings)
    sweep = submission.sweep
    last = len(sweep.elements) - 1
    echo(f"sweep id         {sweep.sweep_id}")
    echo(f"runs             {last + 1}: {sweep.run_id(0)} ... {sweep.run_id(last)}")
    if submission.cluster == "local":
        echo(f"job id           {_first_words(submission.job_ids)}  (processes on this machine)")
    else:
        arrays = "a job array" if len(sweep.chunks) == 1 else f"{len(sweep.chunks)} job arrays"
        echo(f"job id           {', '.join(submission.job_ids)}  ({arrays} on slurm)")
    echo(f"sweep directory  {sweep.path}")
    _print_copy("code             ", sweep.directory)
    echo(f"next             {shlex.join(['hpcddp', 'status', run_argument(sweep.path)])}")
