"""The resumption of a run or a sweep: submit it again, with the same run id and a new job id."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, Final

from hpcddp.errors import HpcddpError
from hpcddp.jobfile.cluster import Cluster
from hpcddp.jobfile.document import path_of
from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.read import ResolvedJob
from hpcddp.jobfile.sweep import element_spec, is_placeholder, placeholders_of
from hpcddp.processes import command_line
from hpcddp.run.directory import RunDirectory
from hpcddp.run.events import append_event
from hpcddp.run.files import exists, locked, open_regular, user_name, why_unreadable, write_bytes, write_text
from hpcddp.run.job_file import read_exported_values, read_job_file, read_script
from hpcddp.run.job_records import Change, SubmissionRecord, newest_start, read_submission
from hpcddp.run.moved import (
    is_same_directory,
    original_of,
    resume_command_with_job,
    script_owner,
    update_script_path,
)
from hpcddp.run.ownership import (
    check_run_directory,
    group_writable_warnings,
    is_alive,
    refuse_another_training,
    runs_script,
)
from hpcddp.run.record import LARGEST_RECORD, RecordError
from hpcddp.run.result import has_finished, resume_command
from hpcddp.run.sweep import Chunk, Sweep, index_of, read_sweep, sweep_of
from hpcddp.slurm import commands
from hpcddp.slurm.hostlist import ranges_text
from hpcddp.slurm.job import slurm_job_id, wait_for_answer
from hpcddp.slurm.job_environment import (
    FIRST,
    NO_DEPENDENCY,
    PICKLE_DIGEST,
    ArrayPlace,
    Dependency,
    submission_environment,
    submitters_umask,
)
from hpcddp.slurm.states import ENDED_STATES
from hpcddp.submission.changes import consequences, total_steps
from hpcddp.submission.checks import check_submittable, check_sweep_submittable
from hpcddp.submission.render import is_default_template
from hpcddp.submission.request import SubmissionError, SubmitRequest
from hpcddp.submission.source import record_source
from hpcddp.submission.submit import PreparedJob, Submission, check_path, prepare, submit_script, write_run
from hpcddp.submission.sweep import pickle_digest
from hpcddp.submission.sweep_element import array_of_one, begin_element, write_submission


def resume(
    run: RunDirectory, *, environment: Mapping[str, str], dependency: Dependency = NO_DEPENDENCY, force: bool = False
) -> Submission:
    """Submit a run that has ended but not finished again, with its own script.

    Args:
        run: the run.
        environment: the submitter's environment.
        dependency: what the job waits for.
        force: whether to submit although this machine shows an obstacle that the nodes may not have.

    Raises:
        SubmissionError: the run is alive, has finished, is a copy of another, or has no script of its own.
        RunDirectoryError: its directory is not safe, or it was moved and its script cannot be changed accordingly.
    """
    with _one_resumption_at_a_time(run):
        return _resume(run, environment=environment, dependency=dependency, force=force)


def _resume(run: RunDirectory, *, environment: Mapping[str, str], dependency: Dependency, force: bool) -> Submission:
    """Do what ``resume`` does, without its lock."""
    check_run_directory(run.path)
    previous = _own_submission(run)
    _refuse_copy(run)
    _refuse_finished(run)
    _refuse_alive(run, previous)
    request = replace(_same_request(run, previous, environment, dependency), force=force)
    notes = check_submittable(request)
    _record_resumption(run)
    record_source(run, request)
    return _submit_again(run, request, notes)


@contextmanager
def _one_resumption_at_a_time(run: RunDirectory) -> Iterator[None]:
    """Wait for another resumption of a run, or of the sweep that it is an element of, and keep further ones out.

    Two at once would both see that the run has ended, and submit it twice.
    """
    check_run_directory(run.path)
    sweep = read_sweep(run.path) or sweep_of(run)
    with locked(run.events if sweep is None else sweep.directory.events):
        yield


def own_request(
    run: RunDirectory,
    change: Callable[[JobSpec], ResolvedJob],
    *,
    environment: Mapping[str, str],
    cluster: Cluster | None = None,
    template: str | None = None,
    dependency: Dependency = NO_DEPENDENCY,
) -> SubmitRequest:
    """Return the request that submits a run again with its own job, some values of which the command line changes.

    Args:
        run: the run.
        change: returns the run's job with the changes.
        environment: the submitter's environment.
        cluster: where the job goes; None is where it went before.
        template: the template; None is the run's own.
        dependency: what the job waits for.

    Raises:
        HpcddpError: the run is a copy, has no submission, was submitted from a directory that does not exist any more
            or with a template of its own, or its job cannot be read.
    """
    check_run_directory(run.path)
    previous = _own_submission(run)
    _refuse_copy(run)
    owner = script_owner(run)
    check_run_directory(owner.path)
    custom = (read_submission(owner) or previous).template
    spec = _own_job(run)
    if not is_default_template(custom):
        raise SubmissionError(
            f"the run {run.run_id} was submitted with --template {custom}, whose script may hold more than its job; "
            f"give the job file and the template too: {resume_command_with_job(run)} --template {custom}"
        )
    if not Path(previous.directory).is_dir():
        raise SubmissionError(
            f"the run {run.path} was submitted from {previous.directory}, which no longer exists; give the job file "
            f"too, in the directory that the code is in now: {resume_command_with_job(run)}"
        )
    values = {**read_exported_values(owner), **spec.environment.env}
    own = spec.model_copy(
        update={
            "run_root": str(run.path.absolute().parent.parent),
            "environment": spec.environment.model_copy(update={"env": values}),
        }
    )
    job = change(own)
    chooses_python = "environment.python" in job.named
    return SubmitRequest(
        job=job,
        run_id=run.run_id,
        cluster=cluster or previous.cluster,
        python=(job.spec.environment.python or sys.executable) if chooses_python else previous.python,
        template=template,
        directory=Path(previous.directory),
        environment=environment,
        dependency=dependency,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """A resumption that is checked; nothing is changed yet.

    Args:
        job: the job with which the run continues.
        changes: what changes in the training.
        consequences: the same, and what follows from it, a sentence each.
        original: the run that the run's directory is a copy of; None if it is no copy.
    """

    job: PreparedJob
    changes: tuple[Change, ...]
    consequences: tuple[str, ...]
    original: Path | None


def prepare_resumption(run: RunDirectory, request: SubmitRequest) -> Resumption:
    """Check whether a run that has ended may be submitted again with a job, without a change to anything.

    Args:
        run: the run.
        request: the request with the job, which replaces the run's own.

    Raises:
        HpcddpError: the run is alive, or has finished and the job has no more work for it; the job belongs to another
            run or is another training; or the directory is not safe.
    """
    check_run_directory(run.path)
    _refuse_whole_sweep(run)
    original = original_of(run)
    _refuse_alive(run, _newest_submission(run), original=original)
    if not request.job.named & _MORE_WORK:
        _refuse_finished(run)
    job = prepare(replace(request, run_id=run.run_id, job=job_of_run(run, request.job)))
    expected = job.request.run.path
    if expected.resolve() != run.path.resolve():
        raise SubmissionError(
            f"the job's run_root and name lead to {expected}, but the run is {run.path}; give the job the run's own "
            "name and run_root, and submit from where it was submitted"
        )
    spec = job.request.job.spec
    changes = refuse_another_training(run, spec, job.request.job.named)
    changes += tuple(_changes_of_element(run, spec, job.request.job.named, {change.key for change in changes}))
    if not _MORE_WORK & {change.key for change in changes}:
        _refuse_finished(run)
    sentences = consequences(run, read_job_file(run), spec, changes) if changes else ()
    return Resumption(job=job, changes=changes, consequences=sentences, original=original)


def resume_with_job(run: RunDirectory, request: SubmitRequest) -> Submission:
    """Submit a run that has ended again, with another job; for example with other resources.

    Args:
        run: the run.
        request: the request with the job, which replaces the run's own.

    Raises:
        HpcddpError: see ``prepare_resumption``; or the job could not be submitted, and the run keeps its own.
    """
    with _one_resumption_at_a_time(run):
        return _resume_with_job(run, request)


def _resume_with_job(run: RunDirectory, request: SubmitRequest) -> Submission:
    resumption = prepare_resumption(run, request)
    job = resumption.job
    before = {path: _content(path) for path in (run.job_file, run.plan, run.exported_values, run.script)}
    _record_resumption(run, resumption.changes)
    record_source(run, job.request)
    if resumption.original is not None:
        # The copy becomes an independent run, also in every tracker.
        shutil.rmtree(run.trackers, ignore_errors=True)
    with ExitStack() as undo:
        for path, content in before.items():
            undo.callback(_restore, path, content)
        try:
            write_run(run, job, total_steps=total_steps(run, job.request.job.spec))
        except OSError as error:
            raise SubmissionError(
                f"nothing was submitted: {error.filename2 or error.filename} cannot be replaced "
                f"({why_unreadable(error)}); remove it, or make room for it"
            ) from error
        submission = _submit_again(run, job.request, job.notes, resumption.changes)
        undo.pop_all()
    return replace(submission, consequences=resumption.consequences)


def _content(path: Path) -> bytes | None:
    """Return the content of a file; None if it is not there, or cannot be read.

    Raises:
        SubmissionError: it is too large to be kept until the job is submitted.
    """
    try:
        with open_regular(path) as (stream, size):
            if size > LARGEST_RECORD:
                raise SubmissionError(f"nothing was submitted: {path} has {size} bytes, so it is damaged; remove it")
            return stream.read()
    except OSError:
        return None


def _restore(path: Path, content: bytes | None) -> None:
    if content is None:
        # What could not be replaced cannot be removed.
        with suppress(OSError):
            path.unlink()
    else:
        write_bytes(path, content)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResumption:
    """Elements of a sweep that continue.

    Args:
        sweep: the sweep.
        jobs: the new job id of each element that continues, by its index.
        dropped: names of inherited variables that sbatch did not get, because they would override directives.
        warnings: for the user, a sentence each.
    """

    sweep: Sweep
    cluster: Cluster
    jobs: Mapping[int, str]
    dropped: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def job_ids(self) -> list[str]:
        """The ids of the new jobs; an array is one."""
        return list(dict.fromkeys(job_id.partition("_")[0] for job_id in self.jobs.values()))

    def as_json(self) -> dict[str, Any]:
        """Return what ``submit --json`` prints, without the number of the other elements."""
        return {
            "sweep_id": self.sweep.sweep_id,
            "sweep_dir": str(self.sweep.path),
            "cluster": self.cluster,
            "job_ids": self.job_ids,
            "elements": [
                {"run_id": self.sweep.run_id(index), "job_id": job_id, "run_dir": str(self.sweep.run(index).path)}
                for index, job_id in self.jobs.items()
            ],
            "dropped_environment": list(self.dropped),
            "warnings": list(self.warnings),
        }


def resume_sweep(
    sweep: Sweep, elements: Sequence[int], *, environment: Mapping[str, str], dependency: Dependency, force: bool
) -> SweepResumption:
    """Submit elements of a sweep again, with the script of the sweep: as one job array, or several of a long sweep.

    Args:
        sweep: the sweep.
        elements: the indices of the elements, in order: all have ended and none has finished.
        environment: the submitter's environment.
        dependency: what the job waits for.
        force: whether to submit although this machine shows an obstacle that the nodes may not have.

    Raises:
        HpcddpError: the sweep is a copy of another, has no script of its own, or Slurm refused it.
    """
    with _one_resumption_at_a_time(sweep.directory):
        return _resume_sweep(sweep, elements, environment=environment, dependency=dependency, force=force)


def _resume_sweep(
    sweep: Sweep, elements: Sequence[int], *, environment: Mapping[str, str], dependency: Dependency, force: bool
) -> SweepResumption:
    request, notes = prepare_sweep(sweep, elements, environment=environment, dependency=dependency, force=force)
    owner = sweep.directory
    if request.cluster == "local":
        here = {
            index: _resume(sweep.run(index), environment=environment, dependency=NO_DEPENDENCY, force=force).job_id
            for index in elements
        }
        return SweepResumption(sweep=sweep, cluster="local", jobs=here)
    _refuse_alive_elements(sweep, elements, environment)
    _, directory = update_script_path(owner, request.directory)
    # An element with a script or a log of its own was resumed alone, and cannot share those of the array.
    alone = [index for index in elements if _is_on_its_own(sweep, index)]
    together = [index for index in elements if index not in alone]
    clean, dropped = submission_environment(environment)
    clean[PICKLE_DIGEST] = pickle_digest(sweep)
    jobs: dict[int, str] = {}
    results: dict[int, bytes | None] = {}
    try:
        # One after the other: those before an element that cannot continue get their results back.
        results.update((index, _prepare_to_continue(sweep, index, request.job.spec)) for index in together)
        for chunk in sweep.chunks:
            indices = [index for index in together if 0 <= index - chunk.first < chunk.count]
            if indices:
                limit = request.job.spec.max_parallel
                jobs |= _submit_array(
                    sweep,
                    chunk,
                    indices,
                    environment=clean,
                    directory=directory,
                    dependency=_after_arrays(dependency, jobs.values()) if limit else dependency,
                    limit=limit,
                )
    except HpcddpError:
        for job_id in dict.fromkeys(job_id.partition("_")[0] for job_id in jobs.values()):
            commands.cancel([job_id], clean)
        for index, result in results.items():
            if result is not None:
                write_bytes(sweep.run(index).result, result)
        raise
    for index, job_id in jobs.items():
        write_submission(sweep, index, job_id, directory=directory, python=request.python)
    for index in alone:
        run = begin_element(sweep, index, request.job.spec)
        jobs[index] = _resume(run, environment=environment, dependency=dependency, force=force).job_id
    return SweepResumption(
        sweep=sweep,
        cluster="slurm",
        jobs=dict(sorted(jobs.items())),
        dropped=dropped,
        warnings=(*notes, *group_writable_warnings(sweep.path)),
    )


def _after_arrays(dependency: Dependency, job_ids: Iterable[str]) -> Dependency:
    """Return the dependency that also waits for the newest array, which itself waits for those before it."""
    arrays = [job_id.partition("_")[0] for job_id in job_ids]
    return dependency.and_after(arrays[-1]) if arrays else dependency


def prepare_sweep(
    sweep: Sweep, elements: Sequence[int], *, environment: Mapping[str, str], dependency: Dependency, force: bool
) -> tuple[SubmitRequest, tuple[str, ...]]:
    """Check whether elements of a sweep can be submitted again, without a change; arguments as ``resume_sweep``.

    Returns:
        The request of the sweep, and what may keep its elements from running, a sentence each.

    Raises:
        HpcddpError: the sweep is a copy of another, has no script of its own, or cannot run.
    """
    check_run_directory(sweep.path)
    owner = sweep.directory
    previous = read_submission(owner)
    if previous is None or (previous.cluster == "slurm" and not owner.script.exists()):
        raise SubmissionError(
            f"the script of the sweep {sweep.path} was submitted by hand and is not kept there; give the job file, and "
            f"resume its runs one by one: {_with_job(sweep.run(elements[0]))}"
        )
    _refuse_copy(owner)
    request = replace(_same_request(owner, previous, environment, dependency), force=force)
    table = request.sweep_table
    if table is None or previous.cluster == "local":
        # Each element of a sweep on this machine is checked as a run of its own.
        return request, ()
    notes = check_sweep_submittable(request, table)
    check_path(owner.path, "slurm")
    return request, notes


def _is_on_its_own(sweep: Sweep, index: int) -> bool:
    run = sweep.run(index)
    log = sweep.batch_log(sweep.job_id(index) or "")
    own_log = exists(run.batch_log) and not is_same_directory(run.batch_log, log) and run.batch_log.stat().st_size > 0
    return run.script.exists() or own_log


def _prepare_to_continue(sweep: Sweep, index: int, job: JobSpec) -> bytes | None:
    """Prepare an element of a sweep with this job to continue in an array; return its result, which is removed."""
    run = begin_element(sweep, index, job)
    check_run_directory(run.path)
    result = _content(run.result)
    if not run.batch_log.is_symlink():
        log = sweep.batch_log(sweep.job_id(index) or "")
        if not exists(log):
            sweep.logs.mkdir(mode=0o700, exist_ok=True)
            write_text(log, "")
        run.batch_log.unlink(missing_ok=True)
        run.batch_log.symlink_to(os.path.relpath(log, run.path))
    _record_resumption(run)
    run.result.unlink(missing_ok=True)
    return result


def _submit_array(
    sweep: Sweep,
    chunk: Chunk,
    indices: Sequence[int],
    *,
    environment: Mapping[str, str],
    directory: Path,
    dependency: Dependency,
    limit: int | None,
) -> dict[int, str]:
    """Submit elements of one array of the sweep as an array again, and return their job ids."""
    places = [index - chunk.first for index in indices]
    at_once = "" if limit is None else f"%{limit}"
    # Each batch script appends to the log of its element.
    log = str(sweep.batch_log(f"{chunk.job_id}_ARRAY_INDEX")).replace("%", "%%").replace("ARRAY_INDEX", "%a")
    job_id = commands.sbatch(
        sweep.directory.script,
        environment={**environment, **dependency.environment, **({FIRST: str(chunk.first)} if chunk.first else {})},
        directory=directory,
        dependency=dependency.text,
        options=(f"--array={ranges_text(places)}{at_once}", f"--output={log}", f"--error={log}"),
    )
    return {index: f"{job_id}_{place}" for index, place in zip(indices, places, strict=True)}


def submit_continuation(run: RunDirectory, *, environment: Mapping[str, str]) -> Submission:
    """Submit the run's script again from within its job, which is about to end; the budgets are not reset.

    Args:
        run: the run.
        environment: the batch script's environment.

    Raises:
        HpcddpError: the run has no script of its own, or Slurm refused it.
    """
    check_run_directory(run.path)
    # The run belongs to this job until the job has ended.
    dependency = NO_DEPENDENCY.and_after(slurm_job_id(environment) or "")
    # The next job inherits the umask of sbatch.
    with submitters_umask(environment):
        return _submit_again(run, _same_request(run, _own_submission(run), environment, dependency))


def _same_request(
    run: RunDirectory, previous: SubmissionRecord, environment: Mapping[str, str], dependency: Dependency
) -> SubmitRequest:
    """Return the request that submits a run again as it was submitted before."""
    spec = read_job_file(run)
    return SubmitRequest(
        job=ResolvedJob(spec=spec, origins={}),
        run_id=run.run_id,
        cluster=previous.cluster,
        python=previous.python,
        template=previous.template,
        directory=Path(previous.directory),
        environment=environment,
        dependency=dependency,
    )


def _submit_again(
    run: RunDirectory, request: SubmitRequest, notes: tuple[str, ...] = (), changes: Sequence[Change] = ()
) -> Submission:
    check_path(run.path, request.cluster)
    run, directory = update_script_path(run, request.directory)
    run.submitit.mkdir(mode=0o700, exist_ok=True)
    owner, element = _script_of(run)
    request = replace(request, directory=directory)
    with ExitStack() as undo:
        # The result of a run that had ended: the run goes on, if it is submitted.
        undo.callback(_restore, run.result, _content(run.result))
        run.result.unlink(missing_ok=True)
        submission = submit_script(run, request, read_script(owner), element=element, notes=notes, changes=changes)
        undo.pop_all()
    return submission


def _script_of(run: RunDirectory) -> tuple[RunDirectory, ArrayPlace | None]:
    """Return where a run's script is: an element has that of its sweep, until it is resumed with a job of its own."""
    sweep = None if run.script.exists() else sweep_of(run)
    if sweep is None:
        return run, None
    check_run_directory(sweep.path)
    return sweep.directory, array_of_one(sweep, index_of(run))


def job_of_run(run: RunDirectory, job: ResolvedJob) -> ResolvedJob:
    """Return the job with which a run continues.

    An element of a sweep keeps its values, whatever the job file says; those that the command line names are new. Its
    own command has the values of its placeholders already, and a new command need not have them.

    Raises:
        SubmissionError: the job has a sweep, and the run is not an element of a sweep.
    """
    sweep = sweep_of(run)
    if sweep is None and job.spec.sweep is None:
        return job
    if sweep is None:
        raise SubmissionError(
            f"the job has a sweep, and the run {run.run_id} is not an element of one; leave the sweep out: "
            "--set sweep=null"
        )
    is_own = exists(run.job_file) and read_job_file(run).command == job.spec.command
    placeholders = set() if is_own else placeholders_of(job.spec.command or ())
    kept = {
        key: value
        for key, value in _values_of_element(run, sweep).items()
        if key not in job.named and (key in placeholders or not is_placeholder(key))
    }
    return replace(job, spec=element_spec(job.spec, kept))


def _values_of_element(run: RunDirectory, sweep: Sweep) -> dict[str, Any]:
    """Return the values of an element of a sweep, those that resumptions have changed as they are now."""
    values, submission = dict(sweep.elements[index_of(run)]), read_submission(run)
    changes = () if submission is None else submission.changes
    return values | {change.key: change.after for change in changes if change.key in values}


def _changes_of_element(
    run: RunDirectory, spec: JobSpec, named: Collection[str], known: Collection[str]
) -> Iterator[Change]:
    """Yield which values of an element of a sweep the command line changes, besides the known changes."""
    sweep = sweep_of(run)
    for key, before in () if sweep is None else _values_of_element(run, sweep).items():
        if key in named and key not in known:
            after = reduce(getitem, path_of(key), spec.model_dump(mode="json"))
            if after != before:
                yield Change(key=key, before=before, after=after)


def _own_submission(run: RunDirectory) -> SubmissionRecord:
    """Return the newest submission of a run whose script is kept."""
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
    previous = read_submission(sweep.directory)
    return None if previous is None else replace(previous, job_id=sweep.job_id(index_of(run)) or previous.job_id)


def _own_job(run: RunDirectory) -> JobSpec:
    sweep = None if run.path.exists() else sweep_of(run)
    if sweep is None:
        return read_job_file(run)
    return element_spec(read_job_file(sweep.directory), sweep.elements[index_of(run)])


def _refuse_whole_sweep(run: RunDirectory) -> None:
    sweep = read_sweep(run.path)
    if sweep is not None:
        raise SubmissionError(
            f"{run.run_id} is a sweep, and its runs continue as they were submitted: hpcddp submit --resume "
            f"{run.run_id}; with options, resume one of them: hpcddp submit --resume {sweep.run(0).run_id}"
        )


def _with_job(run: RunDirectory) -> str:
    return shlex.join(["hpcddp", "submit", "JOB", "--resume", run.run_id])


def _refuse_copy(run: RunDirectory) -> None:
    if (original := original_of(run)) is not None:
        raise SubmissionError(
            f"{run.path} is a copy of the run {original}, and its script continues that run; name that run",
            hint=f"To continue the copy, give a job file with the name {run.path.parent.name}: "
            f"{shlex.join(['hpcddp', 'submit', 'JOB', '--resume', str(run.path)])} "
            f"--set run_root={shlex.quote(str(run.path.parent.parent))}",
        )


_MORE_WORK: Final = frozenset({"train.epochs", "command"})
"""What gives a run that has finished something to do."""


def _refuse_finished(run: RunDirectory) -> None:
    if not has_finished(run):
        return
    spec = None
    with suppress(RecordError):
        spec = read_job_file(run)
    resume = shlex.join(["hpcddp", "submit", "--resume", str(run.path)])
    hint = None
    if spec is not None and spec.train is not None:
        hint = f"To train for more epochs: {resume} --set train.epochs=N"
    elif spec is not None and spec.command is not None:
        hint = f"To run it once more, with other arguments: {resume} -- COMMAND"
    raise SubmissionError(
        f"the run {run.run_id} has finished, and there is nothing to resume; see {run.result}", hint=hint
    )


def _refuse_alive(run: RunDirectory, previous: SubmissionRecord | None, *, original: Path | None = None) -> None:
    start = newest_start(run)
    # A job that waits for its first start has written nothing; only its submission is recorded.
    alive = start.job_id if start is not None and is_alive(start) else None
    if alive is None and previous is not None and (start is None or start.job_id != previous.job_id):
        alive = previous.job_id if _has_not_ended(previous) else None
    if alive is not None and original is not None:
        raise SubmissionError(
            f"{run.path} is a copy of the run {original}, which is alive as {alive}; wait for the end of that run"
        )
    if alive is not None:
        local = previous is not None and previous.cluster != "slurm"
        called = "process" if local else "job"
        end = shlex.join(["hpcddp", "cancel", str(run.path)])
        raise SubmissionError(f"the run {run.run_id} is alive as {called} {alive}; wait for its end, or end it: {end}")


def _refuse_alive_elements(sweep: Sweep, elements: Sequence[int], environment: Mapping[str, str]) -> None:
    """Refuse elements of a sweep of Slurm that another resumption has submitted since they were chosen.

    Raises:
        SubmissionError: names the first of them.
    """
    alive = {job.job_id for job in commands.queue(environment) if job.state not in ENDED_STATES}
    for index in elements:
        run = sweep.run(index)
        submission = read_submission(run)
        job_id = sweep.job_id(index) if submission is None else submission.job_id
        # The job of one that has its result is about to end.
        if job_id in alive and not exists(run.result):
            raise SubmissionError(
                f"nothing was resumed: the run {run.run_id} is alive as job {job_id}; try again, so that it is left out"
            )


def _has_not_ended(previous: SubmissionRecord) -> bool:
    """Return whether the submitted job is pending or running.

    Raises:
        SlurmUnavailableError: Slurm's controller does not answer.
    """
    if previous.cluster != "slurm":
        return previous.host == socket.gethostname() and runs_script(command_line(previous.job_id))
    job = wait_for_answer(previous.job_id)
    return job is not None and job.get("JobState") not in ENDED_STATES


def _record_resumption(run: RunDirectory, changes: Sequence[Change] = ()) -> None:
    """Record in the event log that a person resumes the run, which resets its budgets, and what they change.

    Raises:
        SubmissionError: the event log cannot be written.
    """
    facts: dict[str, Any] = {"changes": [f"{change}" for change in changes]} if changes else {}
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
