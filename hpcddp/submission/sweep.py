"""The submission of a sweep: one script, one job array, one manifest; on this machine a process for each element.

submitit's ``map_array`` writes one pickle and makes one job object for each function. Here the elements differ only in
values that the script knows, so that one pickle is enough for all of them: ``begin`` copies it to the path at which a
``submitit.SlurmJob`` of an element looks for it.
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from hpcddp.jobfile.cluster import Cluster
from hpcddp.run.files import write_text
from hpcddp.run.find import add_to_index
from hpcddp.run.job_file import write_exported_values
from hpcddp.run.job_records import write_submission_record
from hpcddp.run.ownership import group_writable_warnings
from hpcddp.run.sweep import Chunk, Sweep, write_sweep
from hpcddp.slurm import commands
from hpcddp.slurm.job_environment import FIRST, PICKLE_DIGEST, submission_environment
from hpcddp.submission.code import SubmissionCode, take_code
from hpcddp.submission.interrupts import interruptible, tells_interruption, uninterrupted
from hpcddp.submission.render import exported_values, render_script
from hpcddp.submission.request import SubmissionError, SubmitRequest
from hpcddp.submission.source import record_source
from hpcddp.submission.submit import (
    PreparedJob,
    element_request,
    new_run_directory,
    prepare,
    submission_record,
    submit_script,
    submitted_all_the_same,
    turns_of,
    write_run,
)
from hpcddp.submission.sweep_element import PICKLE

# What sbatch answers to an array that is longer than the site allows.
_ARRAY_TOO_LONG = "Invalid job array specification"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSubmission:
    """A submitted sweep.

    Args:
        processes: on this machine the process id of each element; on Slurm none.
        dropped: names of inherited variables that sbatch did not get, because they would override directives.
        notes: what may keep its jobs from running, a sentence each.
    """

    sweep: Sweep
    dropped: tuple[str, ...] = ()
    processes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def cluster(self) -> Cluster:
        """Where its elements run."""
        return "local" if self.processes else "slurm"

    @property
    def job_ids(self) -> list[str]:
        """The ids of the job arrays, or of the processes."""
        return list(self.processes) or [chunk.job_id for chunk in self.sweep.chunks]

    @property
    def warnings(self) -> list[str]:
        """Warnings for the user, a sentence each."""
        return [*self.notes, *group_writable_warnings(self.sweep.path)]

    def as_json(self) -> dict[str, Any]:
        """Return what ``submit --json`` prints."""
        return {
            "sweep_id": self.sweep.sweep_id,
            "sweep_dir": str(self.sweep.path),
            "cluster": self.cluster,
            "job_ids": self.job_ids,
            "chunks": [asdict(chunk) for chunk in self.sweep.chunks],
            "elements": [self._element_as_json(index) for index in range(len(self.sweep.elements))],
            "dropped_environment": list(self.dropped),
            "warnings": self.warnings,
        }

    def _element_as_json(self, index: int) -> dict[str, Any]:
        job_id = self.sweep.job_id(index)
        if self.cluster == "local":
            job_id = self.processes[index]
        return {
            "run_id": self.sweep.run_id(index),
            "job_id": job_id,
            "run_dir": str(self.sweep.run(index).path),
            "values": self.sweep.elements[index],
        }


@tells_interruption()
def submit_sweep(request: SubmitRequest) -> SweepSubmission:
    """Write the directory of a sweep, and submit all elements.

    Raises:
        HpcddpError: the sweep could not be submitted; nothing is left behind.
    """
    job = prepare(request)
    code = take_code(request)
    sweep = Sweep(sweep_id=request.run.run_id, path=request.run.path, elements=request.elements, chunks=())
    if request.cluster == "local":
        return _submit_on_this_machine(sweep, job, code)
    return _submit_to_slurm(sweep, job, code)


def _submit_to_slurm(sweep: Sweep, job: PreparedJob, code: SubmissionCode) -> SweepSubmission:
    """Write the directory of a sweep, whose elements make theirs when they start, and submit its job arrays."""
    request = job.request
    directory = sweep.directory
    with uninterrupted(submitted_all_the_same(directory)):
        with new_run_directory(directory, "slurm"):
            directory.submitit.mkdir(mode=0o700)
            sweep.logs.mkdir(mode=0o700)
            write_run(directory, job)
            record_source(directory, request)
            environment, dropped = submission_environment(request.environment)
            with interruptible():
                notes = (*job.notes, *code.write(directory))
                environment[PICKLE_DIGEST] = pickle_digest(sweep)
            chunks = _submit_chunks(sweep, request, environment)
        sweep = replace(sweep, chunks=chunks)
        write_sweep(sweep)
        _record_submission(request, chunks[0].job_id)
    return SweepSubmission(sweep=sweep, dropped=dropped, notes=notes)


def _submit_on_this_machine(sweep: Sweep, job: PreparedJob, code: SubmissionCode) -> SweepSubmission:
    """Write the directories of a sweep and of its elements, and start a process for each element."""
    request = job.request
    directory = sweep.directory
    process_ids: list[str] = []
    # After an error the directories that were made in this block are removed.
    with ExitStack() as block:
        block.enter_context(uninterrupted(submitted_all_the_same(directory)))
        block.enter_context(new_run_directory(directory, "local"))
        write_text(directory.job_file, request.job_text)
        write_exported_values(directory, exported_values(request))
        record_source(directory, request)
        with interruptible():
            notes = (*job.notes, *code.write(directory))
        write_sweep(sweep)
        # No element runs before all of them are here.
        block.enter_context(turns_of(sweep).hold())
        try:
            for index in range(len(request.elements)):
                with interruptible():
                    element = element_request(request, index)
                block.enter_context(new_run_directory(element.run, "local"))
                process_ids.append(_start_element(element))
            _record_submission(request, process_ids[0])
        except BaseException:
            for process_id in process_ids:
                # It may have ended.
                with suppress(ProcessLookupError):
                    os.kill(int(process_id), signal.SIGKILL)
            raise
    return SweepSubmission(sweep=sweep, processes=tuple(process_ids), notes=notes)


def _start_element(element: SubmitRequest) -> str:
    """Write the files of an element into its directory, start its process, and return the process id."""
    run = element.run
    run.submitit.mkdir(mode=0o700)
    script = render_script(element).text
    write_run(run, PreparedJob(request=element, script=script, notes=()))
    write_text(run.batch_log, "")
    return submit_script(run, element, script).job_id


def _record_submission(request: SubmitRequest, job_id: str) -> None:
    """Record the submission of a sweep, with the id of its first job."""
    write_submission_record(request.run, submission_record(request, job_id))
    add_to_index(request.run)


def pickle_digest(sweep: Sweep) -> str:
    """Return the sha256 of the pickle of all elements, which is written if it is not there."""
    path = sweep.directory.submitit / PICKLE
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    # Slow, and a resumption finds the pickle.
    from hpcddp.submission import executors
    from hpcddp.task import work

    path.parent.mkdir(mode=0o700, exist_ok=True)
    return executors.dump_call(path, work.run, str(sweep.path))


def _submit_chunks(sweep: Sweep, request: SubmitRequest, environment: Mapping[str, str]) -> tuple[Chunk, ...]:
    """Submit all elements of a sweep in as few job arrays as the site's limits allow."""
    if len(sweep.elements) < commands.DEFAULT_LARGEST_ARRAY:
        # Nearly every site allows one array of so many, and asking the controller takes as long as a submission.
        try:
            return _submit_chunks_of(len(sweep.elements), sweep, request, environment)
        except commands.SlurmCommandError as error:
            if _ARRAY_TOO_LONG not in error.message:
                raise
    largest_array = commands.largest_array(environment)
    if largest_array < 1:
        raise SubmissionError("this Slurm allows no job arrays (MaxArraySize); submit each run by itself, with --set")
    return _submit_chunks_of(largest_array, sweep, request, environment)


def _submit_chunks_of(
    size: int, sweep: Sweep, request: SubmitRequest, environment: Mapping[str, str]
) -> tuple[Chunk, ...]:
    """Submit all elements of a sweep in job arrays of ``size`` elements; the last one may have fewer."""
    total = len(sweep.elements)
    arrays: list[JobArray] = []
    for first in range(0, total, size):
        elements = range(first, min(first + size, total))
        options: tuple[str, ...] = ()
        if len(elements) < total:
            # The directive in the script is for an array of all elements.
            options = (array_option(f"0-{len(elements) - 1}", request.job.spec.max_parallel),)
        arrays.append(JobArray(first=first, elements=elements, options=options))
    job_ids = submit_arrays(sweep, arrays, request, environment)
    return tuple(
        Chunk(job_id=job_id, first=array.first, count=len(array.elements))
        for job_id, array in zip(job_ids, arrays, strict=True)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobArray:
    """Elements of a sweep that Slurm gets as one job array.

    Args:
        first: the element that array index 0 is.
        elements: its elements, in order.
        options: options of sbatch that take precedence over the directives of the script.
    """

    first: int
    elements: Sequence[int]
    options: tuple[str, ...]


def array_option(indices: str, max_parallel: int | None) -> str:
    """Return the option of sbatch that submits elements as a job array.

    Args:
        indices: array indices and ranges of them, as in ``0-3,7``.
        max_parallel: how many of them run at the same time; None sets no limit.
    """
    limit = "" if max_parallel is None else f"%{max_parallel}"
    return f"--array={indices}{limit}"


def submit_arrays(
    sweep: Sweep, arrays: Sequence[JobArray], request: SubmitRequest, environment: Mapping[str, str]
) -> list[str]:
    """Submit job arrays with the script of a sweep, and return their job ids; after an error cancel those before it.

    Slurm limits how many elements of one array run at the same time. Where there is a limit, each array therefore waits
    for the end of the one before it.

    Args:
        sweep: the sweep, whose directory has the script and the pickle.
        arrays: the arrays, in the order in which they run.
        request: the request of the sweep.
        environment: the environment of sbatch.
    """
    job_ids: list[str] = []
    try:
        for array in arrays:
            dependency = request.all_dependencies
            if request.job.spec.max_parallel is not None and job_ids:
                dependency = dependency.also(f"afterany:{job_ids[-1]}")
            environment_of_array = {**environment, **dependency.environment}
            if array.first > 0:
                environment_of_array[FIRST] = str(array.first)
            job_id = commands.sbatch(
                sweep.directory.script,
                environment=environment_of_array,
                directory=request.directory,
                dependency=dependency.text,
                options=array.options,
            )
            job_ids.append(job_id)
    except BaseException:
        # No record has the ids of these jobs, so that nothing else would ever cancel them.
        if job_ids:
            commands.cancel(job_ids, environment)
        raise
    return job_ids
