"""The resumption of a sweep: submit those of its elements again that have ended and not finished."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpcddp.jobfile.cluster import Cluster
from hpcddp.jobfile.job import JobSpec
from hpcddp.run.files import exists, write_text
from hpcddp.run.job_records import read_submission, write_submission_record
from hpcddp.run.moved import is_same_directory, refuse_copy
from hpcddp.run.ownership import check_run_directory, group_writable_warnings
from hpcddp.run.sweep import Sweep
from hpcddp.slurm import commands
from hpcddp.slurm.hostlist import ranges_text
from hpcddp.slurm.job import ENDED_STATES, arrays_of
from hpcddp.slurm.job_environment import PICKLE_DIGEST, submission_environment
from hpcddp.submission.code import code_of_resumption, forget_code
from hpcddp.submission.interrupts import interruptible, tells_interruption, uninterrupted
from hpcddp.submission.request import SubmissionError, SubmitRequest
from hpcddp.submission.resume import (
    code_written,
    one_resumption_at_a_time,
    record_resumption,
    request_to_resume,
    restored_on_error,
    resume_locked,
)
from hpcddp.submission.submit import (
    PreparedJob,
    check_path,
    prepare,
    submission_record,
    submitted_all_the_same,
    write_run,
)
from hpcddp.submission.sweep import JobArray, array_option, pickle_digest, submit_arrays
from hpcddp.submission.sweep_element import begin_element, write_submission


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResumption:
    """Elements of a sweep that continue.

    Args:
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
        return arrays_of(self.jobs.values())

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


@tells_interruption()
def resume_sweep(sweep: Sweep, elements: Sequence[int], request: SubmitRequest) -> SweepResumption:
    """Submit elements of a sweep again, rendered anew: as one job array, or several of a long sweep.

    Args:
        elements: the indices of the elements, in order: all have ended and none has finished.
        request: the request that submits the sweep again.

    Raises:
        HpcddpError: the sweep is a copy of another, or Slurm refused it; or its code has changed, and the request does
            not say which one runs.
    """
    directory = sweep.directory
    with one_resumption_at_a_time(directory):
        job = prepare_sweep(sweep, request)
        code = code_of_resumption(directory, request)
        with uninterrupted(submitted_all_the_same(directory)), code_written(directory, code) as notes_of_code:
            if code is not None:
                for index in elements:
                    forget_code(sweep.run(index))
            if request.cluster == "local":
                processes = {index: _resume_alone(sweep, index, request) for index in elements}
                return SweepResumption(sweep=sweep, cluster="local", jobs=processes)
            return _resume_on_slurm(sweep, elements, replace(job, notes=(*job.notes, *notes_of_code)))


def prepare_sweep(sweep: Sweep, request: SubmitRequest) -> PreparedJob:
    """Check whether elements of a sweep can be submitted again with a request, without a change.

    Raises:
        HpcddpError: the sweep is a copy of another, or cannot run.
    """
    refuse_copy(sweep.directory)
    check_path(sweep.path, request.cluster)
    return prepare(request)


def _resume_alone(sweep: Sweep, index: int, request: SubmitRequest) -> str:
    run = begin_element(sweep, index, request.job.spec)
    own_request = replace(
        request_to_resume(run, environment=request.environment), dependency=request.dependency, force=request.force
    )
    return resume_locked(run, own_request, takes_code=False).job_id


def _resume_on_slurm(sweep: Sweep, elements: Sequence[int], job: PreparedJob) -> SweepResumption:
    """Submit as many elements as possible in job arrays, and the others as jobs of their own."""
    request = job.request
    directory = sweep.directory
    with interruptible():
        _refuse_alive_elements(sweep, elements, request.environment)
    environment, dropped = submission_environment(request.environment)
    environment[PICKLE_DIGEST] = pickle_digest(sweep)
    alone = [index for index in elements if _was_resumed_alone(sweep, index)]
    together = [index for index in elements if index not in alone]
    files = (directory.job_file, directory.exported_values, directory.script, directory.submission)
    with restored_on_error(*files), _prepare_to_continue(sweep, together, request.job.spec):
        write_run(directory, job)
        write_submission_record(directory, submission_record(request, sweep.chunks[0].job_id))
        jobs = _submit_together(sweep, together, request, environment)
        for index, job_id in jobs.items():
            write_submission(sweep, index, job_id)
    for index in alone:
        jobs[index] = _resume_alone(sweep, index, request)
    return SweepResumption(
        sweep=sweep,
        cluster="slurm",
        jobs=dict(sorted(jobs.items())),
        dropped=dropped,
        warnings=(*job.notes, *group_writable_warnings(sweep.path)),
    )


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


def _was_resumed_alone(sweep: Sweep, index: int) -> bool:
    """Return whether an element has a script or a log of its own, and cannot share those of an array."""
    run = sweep.run(index)
    if run.script.exists():
        return True
    if not exists(run.batch_log) or is_same_directory(run.batch_log, _log_of(sweep, index)):
        return False
    return run.batch_log.stat().st_size > 0


@contextmanager
def _prepare_to_continue(sweep: Sweep, elements: Sequence[int], job: JobSpec) -> Iterator[None]:
    """Prepare elements of a sweep with this job to continue in job arrays; after an error give their results back."""
    with ExitStack() as results:
        for index in elements:
            run = begin_element(sweep, index, job)
            check_run_directory(run.path)
            results.enter_context(restored_on_error(run.result))
            _link_log(sweep, index)
            record_resumption(run)
            run.result.unlink(missing_ok=True)
        yield


def _link_log(sweep: Sweep, index: int) -> None:
    """Make the log of an element a link to its log in the directory of the sweep, where an array writes."""
    run = sweep.run(index)
    if run.batch_log.is_symlink():
        return
    log = _log_of(sweep, index)
    if not exists(log):
        sweep.logs.mkdir(mode=0o700, exist_ok=True)
        write_text(log, "")
    run.batch_log.unlink(missing_ok=True)
    run.batch_log.symlink_to(os.path.relpath(log, run.path))


def _submit_together(
    sweep: Sweep, elements: Sequence[int], request: SubmitRequest, environment: Mapping[str, str]
) -> dict[int, str]:
    """Submit elements in an array for each array of the sweep that they belong to; return their job ids by index."""
    max_parallel = request.job.spec.max_parallel
    arrays: list[JobArray] = []
    for chunk in sweep.chunks:
        elements_of_chunk = [index for index in elements if 0 <= index - chunk.first < chunk.count]
        if elements_of_chunk:
            indices = ranges_text([index - chunk.first for index in elements_of_chunk])
            # Each batch script appends to the log of its element: %a is the array index (sbatch(1), FILENAME PATTERN).
            log = str(sweep.batch_log(f"{chunk.job_id}_ARRAY_INDEX")).replace("%", "%%").replace("ARRAY_INDEX", "%a")
            options = (array_option(indices, max_parallel), f"--output={log}", f"--error={log}")
            arrays.append(JobArray(first=chunk.first, elements=elements_of_chunk, options=options))
    array_ids = submit_arrays(sweep, arrays, request, environment)
    jobs: dict[int, str] = {}
    for array_id, array in zip(array_ids, arrays, strict=True):
        jobs |= {index: f"{array_id}_{index - array.first}" for index in array.elements}
    return jobs


def _log_of(sweep: Sweep, index: int) -> Path:
    """Return the log of the batch script of an element in the directory of its sweep."""
    return sweep.batch_log(sweep.job_id(index) or "")
