"""An element of a sweep as a run of its own: made when its batch script starts, or when it is resumed."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from hpcddp.errors import UserError
from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.sweep import element_spec, elements_of
from hpcddp.jobfile.write import dump_job
from hpcddp.run.directory import RunDirectory
from hpcddp.run.files import open_to_append, write_bytes, write_text
from hpcddp.run.find import chosen_run, find_run
from hpcddp.run.job_file import read_submitted_job
from hpcddp.run.job_records import read_submission, write_submission_record
from hpcddp.run.moved import owner_of, refuse_copy
from hpcddp.run.ownership import check_run_directory, make_private_directory
from hpcddp.run.sweep import Chunk, Sweep, create_sweep, index_of, read_sweep, sweep_of
from hpcddp.slurm.job_environment import FIRST
from hpcddp.submission.request import first_plan, write_plan

PICKLE = "submitted.pkl"
"""The pickle of a whole sweep, in its submitit folder: the same function for every element."""


class ElementError(UserError):
    """An index that is not one of a sweep's elements."""

    kind = "element"


@dataclass(frozen=True, slots=True, kw_only=True)
class Element:
    """An element whose batch script starts.

    Args:
        sweep: its sweep as the script knows it: with the one job array that the element belongs to.
        index: its index in the sweep.
        spec: its own job.
    """

    sweep: Sweep
    index: int
    spec: JobSpec
    sweep_spec: JobSpec

    @property
    def run(self) -> RunDirectory:
        """Its run directory."""
        return self.sweep.run(self.index)


def element_of(directory: RunDirectory, index: int, spec: JobSpec, environment: Mapping[str, str]) -> Element:
    """Return the element that a batch script starts.

    Args:
        directory: the directory of the sweep.
        index: the element's index in the sweep.
        spec: the job of the sweep.
        environment: the batch script's environment.

    Raises:
        ElementError: the sweep has no element of that index.
    """
    elements = elements_of(spec.sweep)
    if not 0 <= index < len(elements):
        raise ElementError(
            f"the sweep {directory.run_id} has no element {index}; submit it with --array=0-{len(elements) - 1}, or a "
            "part of that"
        )
    first = int(environment.get(FIRST) or 0)
    chunk = Chunk(job_id=environment.get("SLURM_ARRAY_JOB_ID", ""), first=first, count=len(elements) - first)
    sweep = Sweep(sweep_id=directory.run_id, path=directory.path, elements=elements, chunks=(chunk,))
    return Element(sweep=sweep, index=index, spec=element_spec(spec, elements[index]), sweep_spec=spec)


def complete_directory(element: Element, job_id: str, digest: str | None) -> None:
    """Write into an element's directory, which exists, what ``submit`` writes for a single run.

    Args:
        job_id: its job id, with the array index.
        digest: the sha256 of the pickle that was submitted; None if none was.
    """
    run = element.run
    sweep = element.sweep
    make_private_directory(sweep.path)
    # Of a sweep whose script was submitted by hand.
    if read_sweep(sweep.path) is None:
        write_text(sweep.directory.job_file, dump_job(element.sweep_spec, environment_values=False))
        create_sweep(sweep)
    if not run.plan.exists():
        write_plan(run, first_plan(element.spec))
    submission = read_submission(element.run)
    is_recorded = submission is not None and submission.job_id == job_id
    if not is_recorded:
        write_submission(element.sweep, element.index, job_id)
    _link_log(element, job_id)
    if digest is not None:
        _copy_pickle(element, job_id, digest)


def _link_log(element: Element, job_id: str) -> None:
    run = element.run
    log = element.sweep.batch_log(job_id)
    if log.exists() and not run.batch_log.exists():
        # Another process may make the same link.
        with suppress(FileExistsError):
            run.batch_log.symlink_to(os.path.relpath(log, run.path))


def _copy_pickle(element: Element, job_id: str, digest: str) -> None:
    """Copy the pickle of a sweep, if it is the one that was submitted, to where submitit looks for the element's."""
    run = element.run
    pickle = element.sweep.directory.submitit / PICKLE
    if not pickle.is_file():
        return
    content = pickle.read_bytes()
    if hashlib.sha256(content).hexdigest() == digest:
        run.submitit.mkdir(mode=0o700, exist_ok=True)
        write_bytes(run.submitit / f"{job_id}_submitted.pkl", content)


def write_submission(sweep: Sweep, index: int, job_id: str) -> None:
    """Record the submission of an element: that of its sweep, with its own job. A sweep by hand has none."""
    run = sweep.run(index)
    submission = read_submission(sweep.directory)
    if submission is not None:
        record = replace(
            submission,
            job_id=job_id,
            time=time.time(),
            run_dir=str(run.path),
            sweep=sweep.sweep_id,
            index=index,
        )
        write_submission_record(run, record)


def begin_element(sweep: Sweep, index: int, job: JobSpec | None = None) -> RunDirectory:
    """Return the run of an element; one that was cancelled before it began gets the files that a resumption needs.

    Args:
        sweep: a submitted sweep.
        job: the job of the sweep; None reads it.
    """
    run = sweep.run(index)
    if run.path.exists() or not sweep.directory.submission.exists():
        return run
    refuse_copy(sweep.directory)
    make_private_directory(run.path)
    run.submitit.mkdir(mode=0o700, exist_ok=True)
    spec = element_spec(job or read_submitted_job(sweep.directory), sweep.elements[index])
    write_text(run.job_file, dump_job(spec, environment_values=False))
    # Another command may have made it, and its job may write to it already.
    os.close(open_to_append(run.batch_log))
    write_submission(sweep, index, sweep.job_id(index) or "")
    return run


def find_to_resume(text: str, run_root: Path) -> RunDirectory:
    """Return the run to resume; it may be an element that was cancelled before it began.

    Args:
        text: an argument of ``find_run``.
        run_root: the directory of all runs.

    Raises:
        NoRunError: there is no such run, or there are several.
        RunDirectoryError: its directory, or that of its sweep, is not safe.
    """
    run = checked_run(find_run(text, run_root))
    sweep = None if run.path.exists() else sweep_of(run)
    if sweep is None:
        return run
    return begin_element(sweep, index_of(run))


def chosen_to_act_on(text: str | None, run_root: Path) -> RunDirectory:
    """Return the run or sweep whose job a command acts on.

    Args:
        text: an argument of ``find_run``; None is the last run.
        run_root: the directory of all runs.

    Raises:
        NoRunError: there is no such run, or there are several.
        RunDirectoryError: its directory, or that of its sweep, is not safe, or is a copy of another run's.
    """
    run = checked_run(chosen_run(text, run_root))
    refuse_copy(run)
    return run


def checked_run(run: RunDirectory) -> RunDirectory:
    """Return the run, if a command may act on it.

    Raises:
        RunDirectoryError: its directory, or that of its sweep, is not safe.
    """
    check_run_directory(run.path)
    check_run_directory(owner_of(run).path)
    return run
