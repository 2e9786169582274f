"""The resumption of a run: submit it again, with the same run id and a new job id."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hpcddp.jobfile.read import ResolvedJob
from hpcddp.jobfile.sweep import element_spec
from hpcddp.run.directory import RunDirectory
from hpcddp.run.events import append_event
from hpcddp.run.job_file import read_job_file, read_script
from hpcddp.run.job_records import SubmissionRecord, newest_start, read_submission
from hpcddp.run.moved import original_of, update_script_path
from hpcddp.run.ownership import check_run_directory, is_alive, refuse_another_training
from hpcddp.run.result import has_finished, resume_command
from hpcddp.run.sweep import index_of, read_sweep, sweep_of
from hpcddp.slurm.job import ENDED_STATES, ask_slurm, slurm_job_id
from hpcddp.slurm.job_environment import ArrayPlace, submitters_umask
from hpcddp.submit.checks import check_submittable
from hpcddp.submit.request import SubmissionError, SubmitRequest
from hpcddp.submit.source import record_source
from hpcddp.submit.submit import Submission, check_path, prepare, submit_script, write_run
from hpcddp.submit.sweep_element import array_of_one


def resume(run: RunDirectory, *, environment: Mapping[str, str], dependency: str | None = None) -> Submission:
    """Submit a run that has ended but not finished again, with its own script.

    Args:
        run: the run.
        environment: the submitter's environment.
        dependency: the value of sbatch's ``--dependency``; None waits for nothing.

    Raises:
        SubmissionError: the run is alive, has finished, is a copy of another, or has no script of its own.
        RunDirectoryError: its directory is not safe, or it was moved and its script cannot be changed accordingly.
    """
    check_run_directory(run.path)
    previous = _own_submission(run)
    _refuse_copy(run)
    _refuse_alive_or_finished(run, previous)
    request = _same_request(run, previous, environment, dependency)
    notes = check_submittable(request)
    _record_resumption(run)
    record_source(run, request)
    return _submit_again(run, request, notes)


def resume_with_job(run: RunDirectory, request: SubmitRequest) -> Submission:
    """Submit a run that has ended but not finished again, with another job; for example with other resources.

    Args:
        run: the run.
        request: the request with the job, which replaces the run's own.

    Raises:
        HpcddpError: the run is alive or has finished, the job belongs to another run or is another training, or the
            directory is not safe.
    """
    check_run_directory(run.path)
    original = original_of(run)
    _refuse_alive_or_finished(run, read_submission(run), original=original)
    job = prepare(replace(request, run_id=run.run_id, job=job_of_run(run, request.job)))
    expected = job.request.run.path
    if expected.resolve() != run.path.resolve():
        raise SubmissionError(
            f"the job's run_root and name lead to {expected}, but the run is {run.path}; give the job the run's own "
            "name and run_root, and submit from where it was submitted"
        )
    refuse_another_training(run, job.request.job.spec)
    _record_resumption(run)
    record_source(run, job.request)
    if original is not None:
        # The copy becomes an independent run, also in every tracker.
        shutil.rmtree(run.trackers, ignore_errors=True)
    write_run(run, job)
    return _submit_again(run, job.request, job.notes)


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
    dependency = f"afterany:{slurm_job_id(environment)}"
    # The next job inherits the umask of sbatch.
    with submitters_umask(environment):
        return _submit_again(run, _same_request(run, _own_submission(run), environment, dependency))


def _same_request(
    run: RunDirectory, previous: SubmissionRecord, environment: Mapping[str, str], dependency: str | None
) -> SubmitRequest:
    """Return the request that submits a run again as it was submitted before."""
    spec = read_job_file(run)
    return SubmitRequest(
        job=ResolvedJob(spec=spec, origins={}),
        run_id=run.run_id,
        cluster=previous.cluster,
        python=previous.python,
        template=None,
        directory=Path(previous.directory),
        environment=environment,
        dependency=dependency,
    )


def _submit_again(run: RunDirectory, request: SubmitRequest, notes: tuple[str, ...] = ()) -> Submission:
    check_path(run.path, request.cluster)
    run, directory = update_script_path(run, request.directory)
    # The result of a run that had ended: the run goes on.
    run.result.unlink(missing_ok=True)
    run.submitit.mkdir(mode=0o700, exist_ok=True)
    owner, element = _script_of(run)
    request = replace(request, directory=directory)
    return submit_script(run, request, read_script(owner), element=element, notes=notes)


def _script_of(run: RunDirectory) -> tuple[RunDirectory, ArrayPlace | None]:
    """Return where a run's script is: an element has that of its sweep, until it is resumed with a job of its own."""
    sweep = None if run.script.exists() else sweep_of(run)
    if sweep is None:
        return run, None
    check_run_directory(sweep.path)
    return sweep.directory, array_of_one(sweep, index_of(run))


def job_of_run(run: RunDirectory, job: ResolvedJob) -> ResolvedJob:
    """Return the job with which a run continues: an element of a sweep keeps its values, whatever the job says.

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
    return replace(job, spec=element_spec(job.spec, sweep.elements[index_of(run)]))


def _own_submission(run: RunDirectory) -> SubmissionRecord:
    """Return the newest submission of a run whose script is kept."""
    _refuse_whole_sweep(run)
    previous = read_submission(run)
    if previous is None:
        raise SubmissionError(
            f"the script of the run {run.path} was submitted by hand and is not kept there; give the job file too: "
            f"{resume_command(run)}"
        )
    return previous


def _refuse_whole_sweep(run: RunDirectory) -> None:
    sweep = read_sweep(run.path)
    if sweep is not None:
        raise SubmissionError(
            f"{run.run_id} is a sweep of {len(sweep.elements)} runs; resume one of them: hpcddp submit --resume "
            f"{sweep.run_id(0)}"
        )


def _refuse_copy(run: RunDirectory) -> None:
    if (original := original_of(run)) is not None:
        raise SubmissionError(
            f"{run.path} is a copy of the run {original}, and its script continues that run; name that run",
            hint=f"To continue the copy, give a job file with the name {run.path.parent.name}: "
            f"{shlex.join(['hpcddp', 'submit', 'JOB', '--resume', str(run.path)])} "
            f"--set run_root={shlex.quote(str(run.path.parent.parent))}",
        )


def _refuse_alive_or_finished(
    run: RunDirectory, previous: SubmissionRecord | None, *, original: Path | None = None
) -> None:
    if has_finished(run):
        raise SubmissionError(f"the run {run.run_id} has finished, and there is nothing to resume; see {run.result}")
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
        local = previous is not None and previous.cluster == "local"
        called, end = ("process", "kill") if local else ("job", "scancel")
        raise SubmissionError(
            f"the run {run.run_id} is alive as {called} {alive}; wait for its end, or end it with: {end} {alive}"
        )


def _has_not_ended(previous: SubmissionRecord) -> bool:
    """Return whether the submitted job is pending or running."""
    if previous.cluster == "local":
        is_here = previous.host in {None, socket.gethostname()}
        return is_here and Path(f"/proc/{previous.job_id}").exists()
    job = ask_slurm(previous.job_id)
    return job is not None and job.get("JobState") not in ENDED_STATES


def _record_resumption(run: RunDirectory) -> None:
    """Record in the event log that a person resumes the run, which resets its budgets."""
    append_event(
        run.events,
        kind="resume",
        time=time.time(),
        attempt=run.newest_attempt() or 0,
        reason=f"resumed by {os.environ.get('USER') or os.getuid()}",
    )
