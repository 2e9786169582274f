"""The resumption of a run: submit it again, with the same run id and a new job id."""

from __future__ import annotations

import shlex
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
from hpcddp.run.job_file import read_exported_values, read_submitted_job
from hpcddp.run.job_records import Change, SubmissionRecord, newest_start, read_submission
from hpcddp.run.moved import owner_of, refuse_copy, under_recorded_path
from hpcddp.run.ownership import check_run_directory, is_alive, refuse_another_training, runs_script
from hpcddp.run.record import LARGEST_RECORD, RecordError
from hpcddp.run.result import has_finished, resume_command
from hpcddp.run.sweep import Sweep, index_of, read_sweep, sweep_of
from hpcddp.slurm.job import ENDED_STATES, wait_for_answer
from hpcddp.submission.changes import consequences, total_steps
from hpcddp.submission.code import SubmissionCode, code_of_resumption, remove_unused_copies
from hpcddp.submission.interrupts import interruptible, tells_interruption, uninterrupted
from hpcddp.submission.request import SubmissionError, SubmitRequest
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

_MORE_WORK: Final = frozenset({"train.epochs", "command"})
"""The fields whose change gives a run that has finished something to do."""


@tells_interruption()
def resume(run: RunDirectory, request: SubmitRequest) -> Submission:
    """Submit a run that has ended again, with the job of a request, rendered anew.

    Raises:
        HpcddpError: see ``prepare_resumption``; or the job could not be submitted, and the run keeps its own.
    """
    with one_resumption_at_a_time(run):
        return resume_locked(run, request)


def resume_locked(run: RunDirectory, request: SubmitRequest, *, takes_code: bool = True) -> Submission:
    """Do what ``resume`` does, in the block of ``one_resumption_at_a_time``.

    ``takes_code`` is False for an element whose sweep has the code with which it goes on.
    """
    resumption = prepare_resumption(run, request, takes_code=takes_code)
    job = resumption.job
    run = job.request.run
    with (
        uninterrupted(submitted_all_the_same(run)),
        restored_on_error(*_files_of(run)),
        code_written(run, resumption.code) as notes_of_code,
    ):
        record_resumption(run, resumption.changes)
        record_source(run, job.request)
        job = replace(job, notes=(*job.notes, *notes_of_code))
        submission = _submit_again(run, job, changes=resumption.changes)
    return replace(submission, consequences=resumption.consequences)


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


def _files_of(run: RunDirectory) -> tuple[Path, ...]:
    """Return what a resumption replaces or removes."""
    return (run.job_file, run.plan, run.exported_values, run.script, run.result)


def _submit_again(run: RunDirectory, job: PreparedJob, *, changes: Sequence[Change] = ()) -> Submission:
    """Write the files of a run that has ended anew, and submit it."""
    request = job.request
    check_path(run.path, request.cluster)
    run.submitit.mkdir(mode=0o700, exist_ok=True)
    try:
        write_run(run, job, total_steps=total_steps(run, request.job.spec))
    except OSError as error:
        raise SubmissionError(
            f"nothing was submitted: {error.filename2 or error.filename} cannot be replaced "
            f"({why_unreadable(error)}); remove it, or make room for it"
        ) from error
    # The run had ended. It goes on, if it is submitted.
    run.result.unlink(missing_ok=True)
    return submit_script(run, request, job.script, notes=job.notes, changes=changes)


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


def request_to_resume(
    run: RunDirectory,
    change: Callable[[JobSpec], ResolvedJob] | None = None,
    *,
    environment: Mapping[str, str],
    cluster: Cluster | None = None,
    template: str | None = None,
) -> SubmitRequest:
    """Return the request that submits a run again with its own job, some values of which the command line may change.

    Args:
        run: the run or the sweep.
        change: returns the run's job with the changes; None changes nothing. Only the caller knows the options, and the
            job that they change is read here.
        cluster: where the job goes; None is where it went before.
        template: the template; None is the run's own.

    Raises:
        HpcddpError: the run has no submission, was submitted from a directory that does not exist any more, or its job
            cannot be read.
    """
    check_run_directory(run.path)
    if change is not None:
        _refuse_whole_sweep(run)
    run = under_recorded_path(run)
    previous = _newest_submission(run)
    if previous is None:
        sweep = read_sweep(run.path)
        first_run = run if sweep is None else sweep.run(0)
        raise SubmissionError(
            f"the script of {run.path} was submitted by hand, so that its values are not kept there; give the job file "
            f"too, of a sweep for each of its runs: {resume_command(first_run, with_job=True)}"
        )
    owner = run if exists(run.exported_values) else owner_of(run)
    check_run_directory(owner.path)
    recorded = _job_so_far(run)
    variables = {**read_exported_values(owner), **recorded.environment.env}
    # The job where the run is now, with the values of its environment variables.
    current = {
        "name": run.name,
        "run_root": str(run.path.absolute().parent.parent),
        "environment": recorded.environment.model_copy(update={"env": variables}),
    }
    spec = recorded.model_copy(update=current)
    job = ResolvedJob(spec=spec, origins={}) if change is None else change(spec)
    python = previous.python
    if "environment.python" in job.named:
        python = job.spec.environment.python or sys.executable
    return SubmitRequest(
        job=job,
        run_id=run.run_id,
        cluster=cluster or previous.cluster,
        python=python,
        template=template or previous.template,
        directory=_directory_of_submission(run, previous, recorded),
        environment=environment,
    )


def _directory_of_submission(run: RunDirectory, previous: SubmissionRecord, job: JobSpec) -> Path:
    """Return the directory in which a run is submitted again: that of its submission, also after a move of both."""
    directory = Path(previous.directory)
    if directory.is_dir():
        return directory
    if not Path(job.run_root).is_absolute():
        for parent in run.path.absolute().parents:
            if parent / job.run_root / job.name / run.run_id == run.path.absolute():
                return parent
    raise SubmissionError(
        f"the run {run.path} was submitted from {directory}, which no longer exists; give the job file "
        f"too, in the directory that the code is in now: {resume_command(run, with_job=True)}"
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
    """

    job: PreparedJob
    code: SubmissionCode | None
    changes: tuple[Change, ...]
    consequences: tuple[str, ...]


def prepare_resumption(run: RunDirectory, request: SubmitRequest, *, takes_code: bool = True) -> Resumption:
    """Check whether a run that has ended may be submitted again with the job of a request; change nothing.

    Raises:
        HpcddpError: the run is alive or a copy, or has finished and the job has no more work for it; the job belongs to
            another run or is another training; the directory is not safe; or the code has changed, and the request does
            not say which one runs.
    """
    check_run_directory(run.path)
    _refuse_whole_sweep(run)
    run = under_recorded_path(run)
    refuse_copy(run)
    if not _MORE_WORK & request.job.named:
        _refuse_finished(run)
    _refuse_alive(run, _newest_submission(run))
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
    code = code_of_resumption(run, job.request) if takes_code else None
    return Resumption(job=job, code=code, changes=changes, consequences=sentences)


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


def _refuse_alive(run: RunDirectory, previous: SubmissionRecord | None) -> None:
    """Refuse a run that has not ended.

    Args:
        previous: its newest submission; None if its script was submitted by hand.

    Raises:
        SubmissionError: names the job.
        SlurmUnavailableError: Slurm's controller does not answer.
    """
    job_id = _alive_job(run, previous)
    if job_id is None:
        return
    kind = "job" if previous is None or previous.cluster == "slurm" else "process"
    end = shlex.join(["hpcddp", "cancel", str(run.path)])
    raise SubmissionError(f"{kind} {job_id} of the run {run.run_id} has not ended; wait for that, or end it: {end}")


def _alive_job(run: RunDirectory, previous: SubmissionRecord | None) -> str | None:
    """Return the job or the process of a run that has not ended; None if it has."""
    start = newest_start(run)
    if start is not None and is_alive(start):
        return start.job_id
    if previous is None:
        return None
    # A job that waits for its first start has written nothing; only its submission is recorded.
    for job_id in previous.job_ids:
        has_started = start is not None and start.job_id == job_id
        if not (has_started or _has_ended(previous, job_id)):
            return job_id
    return None


def _has_ended(submission: SubmissionRecord, job_id: str) -> bool:
    """Return whether a job of a submission is neither pending nor running.

    Raises:
        SlurmUnavailableError: Slurm's controller does not answer.
    """
    if submission.cluster == "slurm":
        job = wait_for_answer(job_id)
        return job is None or job.get("JobState") in ENDED_STATES
    is_on_this_host = submission.host == socket.gethostname()
    return not (is_on_this_host and runs_script(command_line(submission.job_id)))
