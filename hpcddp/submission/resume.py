"""The resumption of a run: submit it again, with the same run id and a new job id."""

from __future__ import annotations

import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, Final

from hpcddp.jobfile.cluster import Cluster
from hpcddp.jobfile.document import path_of
from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.placeholders import placeholders_of
from hpcddp.jobfile.read import ResolvedJob
from hpcddp.jobfile.sweep import element_spec, is_placeholder
from hpcddp.processes import command_line
from hpcddp.run.directory import RunDirectory
from hpcddp.run.events import append_event
from hpcddp.run.files import exists, locked, open_regular, user_name, why_unreadable, write_bytes
from hpcddp.run.job_file import ExportedValues, read_exported_values, read_script, read_submitted_job
from hpcddp.run.job_records import Change, SubmissionRecord, newest_start, read_submission
from hpcddp.run.moved import original_of, script_owner, update_script_path, usable_script
from hpcddp.run.ownership import check_run_directory, is_alive, refuse_another_training, runs_script
from hpcddp.run.record import LARGEST_RECORD, RecordError
from hpcddp.run.result import has_finished, resume_command
from hpcddp.run.sweep import Sweep, index_of, read_sweep, sweep_of
from hpcddp.slurm.job import ENDED_STATES, slurm_job_id, wait_for_answer
from hpcddp.slurm.job_environment import NO_DEPENDENCY, ArrayPlace, Dependency, submitters_umask
from hpcddp.submission.changes import consequences, total_steps
from hpcddp.submission.checks import check_submittable
from hpcddp.submission.code import SubmissionCode, code_of_resumption, remove_unused_copies
from hpcddp.submission.interrupts import interruptible, tells_interruption, uninterrupted
from hpcddp.submission.request import CodeChoice, SubmissionError, SubmitRequest
from hpcddp.submission.source import record_source
from hpcddp.submission.submit import (
    PreparedJob,
    Submission,
    check_path,
    prepare,
    submit_script,
    submitted_all_the_same,
    write_run,
)
from hpcddp.submission.sweep_element import array_of_one
from hpcddp.submission.template import is_default_template

_MORE_WORK: Final = frozenset({"train.epochs", "command"})
"""The fields whose change gives a run that has finished something to do."""


@tells_interruption()
def resume(
    run: RunDirectory,
    *,
    environment: Mapping[str, str],
    dependency: Dependency = NO_DEPENDENCY,
    force: bool = False,
    code: CodeChoice | None = None,
) -> Submission:
    """Submit a run that has ended but not finished again, with its own script.

    Args:
        dependency: what the job waits for.
        force: whether to submit although this machine shows an obstacle that the nodes may not have.
        code: with which code; None leaves that to ``environment.code``.

    Raises:
        SubmissionError: the run is alive, has finished, is a copy of another, or has no script of its own; or its code
            has changed, and ``code`` does not say which one runs.
        RunDirectoryError: its directory is not safe, or it was moved and its script cannot be changed accordingly.
    """
    with one_resumption_at_a_time(run):
        return resume_locked(run, environment=environment, dependency=dependency, force=force, code=code)


def resume_locked(
    run: RunDirectory,
    *,
    environment: Mapping[str, str],
    dependency: Dependency,
    force: bool,
    code: CodeChoice | None = None,
    takes_code: bool = True,
) -> Submission:
    """Do what ``resume`` does, in the block of ``one_resumption_at_a_time``.

    ``takes_code`` is False for an element whose sweep has the code with which it goes on.
    """
    check_run_directory(run.path)
    previous = _previous_submission(run)
    refuse_to_resume_copy(run)
    _refuse_finished(run)
    _refuse_alive(run, previous)
    request = request_as_before(run, previous, environment=environment, dependency=dependency, force=force)
    # Before the event log says that the run was resumed.
    usable_script(run)
    notes = check_submittable(request)
    new_code = code_of_resumption(run, replace(request, code=code)) if takes_code else None
    with uninterrupted(submitted_all_the_same(run)), code_written(run, new_code) as notes_of_code:
        record_resumption(run)
        record_source(run, request)
        return _submit_again(run, request, notes=(*notes, *notes_of_code))


def submit_continuation(run: RunDirectory, *, environment: Mapping[str, str]) -> Submission:
    """Submit the run's script again from within its job, which is about to end; the budgets are not reset.

    ``environment`` is that of the batch script.

    Raises:
        HpcddpError: the run has no script of its own, or Slurm refused it.
    """
    check_run_directory(run.path)
    # The run belongs to this job until the job has ended.
    dependency = NO_DEPENDENCY.and_after(slurm_job_id(environment) or "")
    previous = _previous_submission(run)
    request = request_as_before(run, previous, environment=environment, dependency=dependency)
    # The next job inherits the umask of sbatch.
    with uninterrupted(submitted_all_the_same(run)), submitters_umask(environment):
        return _submit_again(run, request)


@contextmanager
def one_resumption_at_a_time(run: RunDirectory) -> Iterator[None]:
    """Wait for another resumption of a run, or of its sweep, and keep further ones out; ``run`` may be a sweep.

    Two at once would both see that the run has ended, and submit it twice.
    """
    check_run_directory(run.path)
    sweep = read_sweep(run.path) or sweep_of(run)
    owner = run if sweep is None else sweep.directory
    with locked(owner.events):
        yield


def request_as_before(
    run: RunDirectory,
    previous: SubmissionRecord,
    *,
    environment: Mapping[str, str],
    dependency: Dependency,
    force: bool = False,
) -> SubmitRequest:
    """Return the request that submits a run or a sweep again as its previous submission did."""
    return SubmitRequest(
        job=ResolvedJob(spec=read_submitted_job(run), origins={}),
        run_id=run.run_id,
        cluster=previous.cluster,
        python=previous.python,
        template=previous.template,
        directory=Path(previous.directory),
        environment=environment,
        dependency=dependency,
        force=force,
    )


def record_resumption(run: RunDirectory, changes: Sequence[Change] = ()) -> None:
    """Record in the event log that a person resumes the run, which resets its budgets, and what they change.

    Raises:
        SubmissionError: the event log cannot be written.
    """
    facts: dict[str, Any] = {}
    if changes:
        facts["changes"] = [f"{change}" for change in changes]
    try:
        append_event(
            run.events,
            kind="resume",
            time=time.time(),
            attempt=run.newest_attempt() or 0,
            reason=f"resumed by {user_name()}",
            **facts,
        )
    except OSError as error:
        raise SubmissionError(
            f"the run {run.run_id} is not resumed, because {run.events} cannot be written ({why_unreadable(error)}); "
            "make it writable, or move it away"
        ) from error


def _submit_again(
    run: RunDirectory, request: SubmitRequest, *, notes: tuple[str, ...] = (), changes: Sequence[Change] = ()
) -> Submission:
    """Submit the script that is in the directory of a run, or of its sweep."""
    check_path(run.path, request.cluster)
    run, directory = update_script_path(run, request.directory)
    request = replace(request, directory=directory)
    run.submitit.mkdir(mode=0o700, exist_ok=True)
    owner, element = _script_of(run)
    with restored_on_error(run.result):
        # The run had ended. It goes on, if it is submitted.
        run.result.unlink(missing_ok=True)
        return submit_script(run, request, read_script(owner), element=element, notes=notes, changes=changes)


def _script_of(run: RunDirectory) -> tuple[RunDirectory, ArrayPlace | None]:
    """Return where a run's script is: an element has that of its sweep, until it is resumed with a job of its own."""
    sweep = None if run.script.exists() else sweep_of(run)
    if sweep is None:
        return run, None
    check_run_directory(sweep.path)
    return sweep.directory, array_of_one(sweep, index_of(run))


@contextmanager
def restored_on_error(*paths: Path) -> Iterator[None]:
    """Keep the content of files during a block; after an error put back what has changed.

    Raises:
        SubmissionError: a file is too large to be kept.
    """
    contents = {path: _content(path) for path in paths}
    try:
        yield
    except BaseException:
        for path, content in contents.items():
            _restore(path, content)
        raise


@contextmanager
def code_written(run: RunDirectory, code: SubmissionCode | None) -> Iterator[tuple[str, ...]]:
    """Write the code with which a run or a sweep is resumed; after an error in the block put back what was there.

    Args:
        run: the run or the sweep, which has ended.
        code: the code; None leaves what was submitted.

    Yields:
        What of a copy is not as in the project, a sentence each.
    """
    if code is None:
        yield ()
        return
    try:
        with restored_on_error(run.code):
            with interruptible():
                notes = code.write(run)
            yield notes
    finally:
        remove_unused_copies(run)


def _content(path: Path) -> bytes | None:
    """Return the content of a file; None if it is not there, or cannot be read."""
    try:
        with open_regular(path) as (stream, size):
            if size > LARGEST_RECORD:
                raise SubmissionError(f"nothing was submitted: {path} has {size} bytes, so it is damaged; remove it")
            return stream.read()
    except OSError:
        return None


def _restore(path: Path, content: bytes | None) -> None:
    if _content(path) == content:
        # Writing it again could fail, and hide the error that ended the block.
        return
    if content is not None:
        write_bytes(path, content)
        return
    # What could not be replaced cannot be removed.
    with suppress(OSError):
        path.unlink()


def request_with_changes(
    run: RunDirectory,
    change: Callable[[JobSpec], ResolvedJob],
    *,
    environment: Mapping[str, str],
    cluster: Cluster | None = None,
    template: str | None = None,
) -> SubmitRequest:
    """Return the request that submits a run again with its own job, some values of which the command line changes.

    Args:
        change: returns the run's job with the changes. Only the caller knows the options, and the job that they change
            is read here.
        cluster: where the job goes; None is where it went before.
        template: the template; None is the run's own.

    Raises:
        HpcddpError: the run is a copy, has no submission, was submitted from a directory that does not exist any more
            or with a template of its own, or its job cannot be read.
    """
    check_run_directory(run.path)
    previous = _previous_submission(run)
    refuse_to_resume_copy(run)
    owner = script_owner(run)
    check_run_directory(owner.path)
    values = read_exported_values(owner)
    _refuse_custom_template(run, read_submission(owner) or previous, template, values)
    if not Path(previous.directory).is_dir():
        raise SubmissionError(
            f"the run {run.path} was submitted from {previous.directory}, which no longer exists; give the job file "
            f"too, in the directory that the code is in now: {resume_command(run, with_job=True)}"
        )
    recorded = _job_so_far(run)
    variables = {**values.env, **recorded.environment.env}
    # The job where the run is now, with the values of its environment variables.
    current = {
        "run_root": str(run.path.absolute().parent.parent),
        "environment": recorded.environment.model_copy(update={"env": variables}),
    }
    job = change(recorded.model_copy(update=current))
    python = previous.python
    if "environment.python" in job.named:
        python = job.spec.environment.python or sys.executable
    return SubmitRequest(
        job=job,
        run_id=run.run_id,
        cluster=cluster or previous.cluster,
        python=python,
        template=template,
        directory=Path(previous.directory),
        environment=environment,
    )


def _job_so_far(run: RunDirectory) -> JobSpec:
    """Return the job of a run; that of an element that never began is derived from the job of its sweep."""
    sweep = None if run.path.exists() else sweep_of(run)
    if sweep is None:
        return read_submitted_job(run)
    return element_spec(read_submitted_job(sweep.directory), sweep.elements[index_of(run)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """A resumption that is checked; nothing is changed yet.

    Args:
        job: the job with which the run continues.
        code: the code with which the run continues; None for that of its submission.
        changes: what changes in the training.
        consequences: the same, and what follows from it, a sentence each.
        original: the run that the run's directory is a copy of; None if it is no copy.
    """

    job: PreparedJob
    code: SubmissionCode | None
    changes: tuple[Change, ...]
    consequences: tuple[str, ...]
    original: Path | None


def prepare_resumption(run: RunDirectory, request: SubmitRequest) -> Resumption:
    """Check whether a run that has ended may be submitted again with the job of a request; change nothing.

    Raises:
        HpcddpError: the run is alive, or has finished and the job has no more work for it; the job belongs to another
            run or is another training; or the directory is not safe.
    """
    check_run_directory(run.path)
    _refuse_whole_sweep(run)
    original = original_of(run)
    _refuse_alive(run, _newest_submission(run), original=original)
    if not _MORE_WORK & request.job.named:
        _refuse_finished(run)
    job = prepare(replace(request, run_id=run.run_id, job=_job_to_continue_with(run, request.job)))
    if job.request.run.path.resolve() != run.path.resolve():
        raise SubmissionError(
            f"the job's run_root and name lead to {job.request.run.path}, but the run is {run.path}; give the job the "
            "run's own name and run_root, and submit from where it was submitted"
        )
    changes = _allowed_changes(run, job.request.job)
    if not _MORE_WORK & {change.key for change in changes}:
        _refuse_finished(run)
    sentences: tuple[str, ...] = ()
    if changes:
        sentences = consequences(run, read_submitted_job(run), job.request.job.spec, changes)
    code = code_of_resumption(run, job.request)
    return Resumption(job=job, code=code, changes=changes, consequences=sentences, original=original)


@tells_interruption()
def resume_with_job(run: RunDirectory, request: SubmitRequest) -> Submission:
    """Submit a run that has ended again, with the job of a request in place of its own.

    Raises:
        HpcddpError: see ``prepare_resumption``; or the job could not be submitted, and the run keeps its own.
    """
    with one_resumption_at_a_time(run):
        resumption = prepare_resumption(run, request)
        job = resumption.job
        with (
            uninterrupted(submitted_all_the_same(run)),
            restored_on_error(run.job_file, run.plan, run.exported_values, run.script),
            code_written(run, resumption.code) as notes_of_code,
        ):
            record_resumption(run, resumption.changes)
            record_source(run, job.request)
            if resumption.original is not None:
                # The copy becomes an independent run, also in every tracker.
                shutil.rmtree(run.trackers, ignore_errors=True)
            try:
                write_run(run, job, total_steps=total_steps(run, job.request.job.spec))
            except OSError as error:
                raise SubmissionError(
                    f"nothing was submitted: {error.filename2 or error.filename} cannot be replaced "
                    f"({why_unreadable(error)}); remove it, or make room for it"
                ) from error
            notes = (*job.notes, *notes_of_code)
            submission = _submit_again(run, job.request, notes=notes, changes=resumption.changes)
    return replace(submission, consequences=resumption.consequences)


def _job_to_continue_with(run: RunDirectory, job: ResolvedJob) -> ResolvedJob:
    """Return the job with which a run continues.

    An element of a sweep keeps its values, whatever the job file says; those that the command line names are new.

    Raises:
        SubmissionError: the job has a sweep, and the run is not an element of a sweep.
    """
    sweep = sweep_of(run)
    if sweep is None:
        if job.spec.sweep is not None:
            raise SubmissionError(
                f"the job has a sweep, and the run {run.run_id} is not an element of one; leave the sweep out: "
                "--set sweep=null"
            )
        return job
    placeholders: Collection[str] = placeholders_of(job.spec.command or ())
    if exists(run.job_file) and read_submitted_job(run).command == job.spec.command:
        # The command of the element itself, whose placeholders are filled in already.
        placeholders = ()
    kept_values = {}
    for key, value in _values_of_element(run, sweep).items():
        if key in job.named:
            continue
        if is_placeholder(key) and key not in placeholders:
            continue
        kept_values[key] = value
    return replace(job, spec=element_spec(job.spec, kept_values))


def _allowed_changes(run: RunDirectory, job: ResolvedJob) -> tuple[Change, ...]:
    """Return what a job changes in the training of a run, and in the values of an element of a sweep.

    Raises:
        RunDirectoryError: it would be another training.
    """
    changes = refuse_another_training(run, job.spec, job.named)
    sweep = sweep_of(run)
    if sweep is None:
        return changes
    document = job.spec.model_dump(mode="json")
    changed_keys = {change.key for change in changes}
    changes_of_element = []
    for key, value_before in _values_of_element(run, sweep).items():
        if key not in job.named or key in changed_keys:
            continue
        value_now = reduce(getitem, path_of(key), document)
        if value_now != value_before:
            changes_of_element.append(Change(key=key, before=value_before, after=value_now))
    return (*changes, *changes_of_element)


def _values_of_element(run: RunDirectory, sweep: Sweep) -> dict[str, Any]:
    """Return the values of an element of a sweep, those that resumptions have changed as they are now."""
    values = dict(sweep.elements[index_of(run)])
    submission = read_submission(run)
    if submission is not None:
        values |= {change.key: change.after for change in submission.changes if change.key in values}
    return values


def _previous_submission(run: RunDirectory) -> SubmissionRecord:
    """Return the newest submission of a run; refuse a whole sweep, and a run whose script is not kept."""
    _refuse_whole_sweep(run)
    previous = _newest_submission(run)
    if previous is None:
        raise SubmissionError(
            f"the script of the run {run.path} was submitted by hand and is not kept there; give the job file too: "
            f"{resume_command(run)}"
        )
    return previous


def _newest_submission(run: RunDirectory) -> SubmissionRecord | None:
    """Return the newest submission of a run; an element that never began has no directory, and that of its sweep."""
    sweep = None if run.path.exists() else sweep_of(run)
    if sweep is None:
        return read_submission(run)
    submission = read_submission(sweep.directory)
    if submission is None:
        return None
    return replace(submission, job_id=sweep.job_id(index_of(run)) or submission.job_id)


def _refuse_whole_sweep(run: RunDirectory) -> None:
    sweep = read_sweep(run.path)
    if sweep is not None:
        raise SubmissionError(
            f"{run.run_id} is a sweep, and its runs continue as they were submitted: hpcddp submit --resume "
            f"{run.run_id}; with options, resume one of them: hpcddp submit --resume {sweep.run(0).run_id}"
        )


def refuse_to_resume_copy(run: RunDirectory) -> None:
    """Refuse a run or a sweep whose directory is a copy: its script would continue the original.

    Raises:
        SubmissionError: names the original.
    """
    original = original_of(run)
    if original is None:
        return
    resume_copy = shlex.join(["hpcddp", "submit", "JOB", "--resume", str(run.path)])
    raise SubmissionError(
        f"{run.path} is a copy of the run {original}, and its script continues that run; name that run",
        hint=f"To continue the copy, give a job file with the name {run.name}: {resume_copy} "
        f"--set run_root={shlex.quote(str(run.run_root))}",
    )


def _refuse_custom_template(
    run: RunDirectory, submission: SubmissionRecord, chosen_template: str | None, values: ExportedValues
) -> None:
    """Refuse to render a script of the user's own template anew without the template, or without all values."""
    template = submission.template
    if template is None or is_default_template(template):
        return
    if not values.complete:
        raise SubmissionError(
            f"the run {run.run_id} was submitted with --template {template}, for which no values of environment.env "
            f"are kept; give the job file and the template too: {resume_command(run, with_job=True)}"
        )
    if chosen_template is None:
        same_template = shlex.join(["--resume", str(run.path), "--template", template])
        raise SubmissionError(
            f"the run {run.run_id} was submitted with --template {template}, whose script may hold more than its job; "
            f"give the template too: hpcddp submit {same_template}"
        )


def _refuse_finished(run: RunDirectory) -> None:
    if has_finished(run):
        raise SubmissionError(
            f"the run {run.run_id} has finished, and there is nothing to resume; see {run.result}",
            hint=_hint_for_more_work(run),
        )


def _hint_for_more_work(run: RunDirectory) -> str | None:
    """Return how a run that has finished gets something to do; None if that is not known."""
    try:
        job = read_submitted_job(run)
    except RecordError:
        return None
    resume_run = shlex.join(["hpcddp", "submit", "--resume", str(run.path)])
    if job.train is not None:
        return f"To train for more epochs: {resume_run} --set train.epochs=N"
    if job.command is not None:
        return f"To run it once more, with other arguments: {resume_run} -- COMMAND"
    return None


def _refuse_alive(run: RunDirectory, previous: SubmissionRecord | None, *, original: Path | None = None) -> None:
    """Refuse a run that has not ended.

    Args:
        previous: its newest submission; None if its script was submitted by hand.
        original: the run that it is a copy of; None if it is no copy.

    Raises:
        SubmissionError: names the job.
        SlurmUnavailableError: Slurm's controller does not answer.
    """
    job_id = _alive_job(run, previous)
    if job_id is None:
        return
    if original is not None:
        raise SubmissionError(
            f"{run.path} is a copy of the run {original}, which is alive as {job_id}; wait for the end of that run"
        )
    kind = "job" if previous is None or previous.cluster == "slurm" else "process"
    end = shlex.join(["hpcddp", "cancel", str(run.path)])
    raise SubmissionError(f"the run {run.run_id} is alive as {kind} {job_id}; wait for its end, or end it: {end}")


def _alive_job(run: RunDirectory, previous: SubmissionRecord | None) -> str | None:
    """Return the job or the process of a run that has not ended; None if it has."""
    start = newest_start(run)
    if start is not None and is_alive(start):
        return start.job_id
    if previous is None:
        return None
    # A job that waits for its first start has written nothing; only its submission is recorded.
    has_started = start is not None and start.job_id == previous.job_id
    if has_started or _has_ended(previous):
        return None
    return previous.job_id


def _has_ended(submission: SubmissionRecord) -> bool:
    """Return whether a submitted job is neither pending nor running.

    Raises:
        SlurmUnavailableError: Slurm's controller does not answer.
    """
    if submission.cluster == "slurm":
        job = wait_for_answer(submission.job_id)
        return job is None or job.get("JobState") in ENDED_STATES
    is_on_this_host = submission.host == socket.gethostname()
    return not (is_on_this_host and runs_script(command_line(submission.job_id)))
