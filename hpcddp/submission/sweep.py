"""The submission of a sweep: one script, one job array, one manifest; on this machine a process for each element.

submitit's ``map_array`` writes one pickle and makes one job object for each function. Here the elements differ only in
values that the script knows, so that one pickle is enough for all of them: ``begin`` copies it to the path at which a
``submitit.SlurmJob`` of an element looks for it.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hpcddp.errors import HpcddpError
from hpcddp.jobfile.cluster import Cluster
from hpcddp.jobfile.sweep import SweepTable
from hpcddp.run.files import write_text
from hpcddp.run.index import add_to_index
from hpcddp.run.job_records import SubmissionRecord, write_submission_record
from hpcddp.run.ownership import group_writable_warnings, identity
from hpcddp.run.sweep import Chunk, Sweep, write_sweep
from hpcddp.slurm import commands
from hpcddp.slurm.job_environment import FIRST, PICKLE_DIGEST, submission_environment
from hpcddp.submission.render import render_script
from hpcddp.submission.request import SubmissionError, SubmitRequest
from hpcddp.submission.source import record_source
from hpcddp.submission.submit import (
    PreparedJob,
    element_request,
    new_run_directory,
    prepare,
    submit_script,
    turns_of,
    write_run,
)
from hpcddp.submission.sweep_element import PICKLE

_TOO_LONG = "Invalid job array specification"


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
        sweep = self.sweep
        return {
            "sweep_id": sweep.sweep_id,
            "sweep_dir": str(sweep.path),
            "cluster": self.cluster,
            "job_ids": self.job_ids,
            "chunks": [asdict(chunk) for chunk in sweep.chunks],
            "elements": [
                {
                    "run_id": sweep.run_id(index),
                    "job_id": self.processes[index] if self.processes else sweep.job_id(index),
                    "run_dir": str(sweep.run(index).path),
                    "values": values,
                }
                for index, values in enumerate(sweep.elements)
            ],
            "dropped_environment": list(self.dropped),
            "warnings": self.warnings,
        }


def submit_sweep(request: SubmitRequest) -> SweepSubmission:
    """Write the directory of a sweep, and submit all elements.

    Raises:
        HpcddpError: the sweep could not be submitted; nothing is left behind.
    """
    table = request.sweep_table
    if table is None:
        raise ValueError(f"the job {request.job.spec.name} has no sweep")
    if request.cluster == "local":
        return _submit_here(request, table)
    job, directory = prepare(request), request.run
    sweep = Sweep(sweep_id=directory.run_id, path=directory.path, elements=table.elements(), chunks=())
    with new_run_directory(directory, request.cluster):
        for folder in (directory.submitit, sweep.logs):
            folder.mkdir(mode=0o700)
        write_run(directory, job)
        record_source(directory, request)
        clean, dropped = submission_environment(request.environment)
        clean[PICKLE_DIGEST] = pickle_digest(sweep)
        chunks = _Arrays(script=directory.script, request=request, environment=clean).submit(len(table))
    sweep = replace(sweep, chunks=tuple(chunks))
    write_sweep(sweep)
    _write_submission(request, "slurm", chunks[0].job_id)
    return SweepSubmission(sweep=sweep, dropped=dropped, notes=job.notes)


def _submit_here(request: SubmitRequest, table: SweepTable) -> SweepSubmission:
    """Write the directories of a sweep on this machine and of its elements, and start a process for each element."""
    job, directory = prepare(request), request.run
    sweep = Sweep(sweep_id=directory.run_id, path=directory.path, elements=table.elements(), chunks=())
    processes: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(new_run_directory(directory, request.cluster))
        write_text(directory.job_file, request.job_text)
        record_source(directory, request)
        write_sweep(sweep)
        # No element runs before all of them are here.
        stack.enter_context(turns_of(sweep).hold())
        try:
            for index in range(len(table)):
                element = element_request(request, table, index)
                stack.enter_context(new_run_directory(element.run, request.cluster))
                element.run.submitit.mkdir(mode=0o700)
                script = render_script(element).text
                write_run(element.run, PreparedJob(request=element, script=script, notes=()))
                write_text(element.run.batch_log, "")
                processes.append(submit_script(element.run, element, script).job_id)
            _write_submission(request, "local", processes[0])
        except Exception:
            for process in processes:
                os.kill(int(process), signal.SIGKILL)
            raise
    return SweepSubmission(sweep=sweep, processes=tuple(processes), notes=job.notes)


def _write_submission(request: SubmitRequest, cluster: Cluster, job_id: str) -> None:
    """Record the submission of a sweep, with the id of its first job."""
    record = SubmissionRecord(
        cluster=cluster,
        job_id=job_id,
        directory=str(request.directory),
        python=request.python,
        time=time.time(),
        template=request.template,
        **identity(request.run.path),
    )
    write_submission_record(request.run, record)
    add_to_index(request.run)


def pickle_digest(sweep: Sweep) -> str:
    """Return the sha256 of the pickle of all elements, which is written if it is not there."""
    path = sweep.directory.submitit / PICKLE
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    from hpcddp.submission import executors
    from hpcddp.task import work

    path.parent.mkdir(mode=0o700, exist_ok=True)
    return executors.dump_call(path, work.run, str(sweep.path))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrays:
    """The job arrays of a sweep: as few calls of sbatch as the site's limits allow.

    Args:
        script: the script of all elements.
        environment: the environment of sbatch.
    """

    script: Path
    request: SubmitRequest
    environment: Mapping[str, str]

    def submit(self, count: int) -> list[Chunk]:
        """Submit all elements; if an array is refused, cancel the arrays before it."""
        if count < commands.DEFAULT_LARGEST_ARRAY:
            # Nearly every site allows this, and asking the controller takes as long as a submission.
            try:
                return [self._submit(0, count, count, None)]
            except commands.SlurmCommandError as error:
                if _TOO_LONG not in error.message:
                    raise
        largest = commands.largest_array(self.environment)
        if largest < 1:
            raise SubmissionError(
                "this Slurm allows no job arrays (MaxArraySize); submit each run by itself, with --set"
            )
        done: list[Chunk] = []
        try:
            for first in range(0, count, largest):
                limited = self.request.job.spec.max_parallel is not None
                previous = done[-1].job_id if done and limited else None
                done.append(self._submit(first, min(largest, count - first), count, previous))
        except HpcddpError:
            for chunk in done:
                commands.cancel([chunk.job_id], self.environment)
            raise
        return done

    def _submit(self, first: int, count: int, total: int, previous: str | None) -> Chunk:
        """Submit one array.

        Args:
            first: the index of its first element.
            count: the number of its elements.
            total: the number of elements of the sweep.
            previous: the job id of the array that must end first; None for no such array.
        """
        dependency = self.request.dependency
        if previous is not None:
            dependency = dependency.and_after(previous)
        max_parallel = self.request.job.spec.max_parallel
        at_once = "" if max_parallel is None else f"%{max_parallel}"
        job_id = commands.sbatch(
            self.script,
            environment={**self.environment, **dependency.environment, **({FIRST: str(first)} if first else {})},
            directory=self.request.directory,
            dependency=dependency.text,
            options=() if count == total else (f"--array=0-{count - 1}{at_once}",),
        )
        return Chunk(job_id=job_id, first=first, count=count)
