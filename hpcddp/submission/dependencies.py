"""The dependencies of a new job on runs: ``--after RUN`` and ``--after-any RUN``.

Slurm starts a job at once if it depends on a job that Slurm does not know (sbatch(1), ``--dependency``), so each run is
looked up first. A requeued job keeps its job id, so a job that waits for it continues to wait. Slurm waits for the end
of the jobs alone; the start of the job looks whether the runs of ``--after`` have finished.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcddp.errors import UserError
from hpcddp.run.directory import RunDirectory
from hpcddp.run.find import find_run
from hpcddp.run.job_records import newest_start, read_submission
from hpcddp.run.result import FINISHED, read_result, resume_command
from hpcddp.run.sweep import index_of, read_sweep, sweep_of
from hpcddp.slurm import commands
from hpcddp.slurm.job import ENDED_STATES, arrays_of
from hpcddp.slurm.job_environment import Dependency

AFTER = "--after"
AFTER_ANY = "--after-any"


class DependencyError(UserError):
    """A run that a job cannot wait for."""

    kind = "dependency"


def dependency_on(
    after: Sequence[str], after_any: Sequence[str], run_root: Path, environment: Mapping[str, str]
) -> tuple[Dependency, list[str]]:
    """Return the dependency on runs, and a sentence for each run that has ended already.

    Args:
        after: the runs that must finish.
        after_any: the runs that must end in any way.
        run_root: the directory of all runs.

    Raises:
        NoRunError: there is no such run.
        DependencyError: a job cannot wait for a run.
    """
    jobs: list[str] = []
    runs: list[str] = []
    notes: list[str] = []
    for option, texts in ((AFTER, after), (AFTER_ANY, after_any)):
        for text in texts:
            run = find_run(text, run_root)
            left = _jobs_to_wait_for(run, option, environment)
            jobs += left
            if not left:
                notes.append(f"{option} {run.run_id}: it has ended already, and is not waited for")
            elif option == AFTER:
                runs.append(str(run.path.absolute()))
    conditions = (":".join(["afterany", *dict.fromkeys(jobs)]),) if jobs else ()
    return Dependency(conditions=conditions, runs=tuple(dict.fromkeys(runs))), notes


def _jobs_to_wait_for(run: RunDirectory, option: str, environment: Mapping[str, str]) -> list[str]:
    """Return the ids of the jobs of a run or sweep that have not ended; that of the array for elements of a sweep.

    Raises:
        DependencyError: a job cannot wait for the run.
    """
    sweep = read_sweep(run.path)
    try:
        if sweep is None:
            sweep_of_run = sweep_of(run)
            submitted_as = None if sweep_of_run is None else sweep_of_run.job_id(index_of(run))
            left = [_job_left(run, submitted_as, option)]
        else:
            left = [_job_left(sweep.run(index), sweep.job_id(index), option) for index in range(len(sweep.elements))]
        job_ids = [job_id for job_id in left if job_id is not None]
        asked = job_ids if sweep is None else arrays_of(job_ids)
        return [job_id for job_id in asked if _has_job_left(job_id, job_ids, option, environment)]
    except DependencyError as error:
        raise DependencyError(f"{option} {run.run_id}: {error.message}") from None


def _job_left(run: RunDirectory, submitted_as: str | None, option: str) -> str | None:
    """Return the newest job of a run; None if the run has ended."""
    result = read_result(run)
    if result is not None:
        if result.status == FINISHED or option == AFTER_ANY:
            return None
        raise DependencyError(
            f"{run.run_id} has ended as {result.status} ({result.reason}), so it will not finish; "
            f"continue it first: {resume_command(run)}, or use {AFTER_ANY}"
        )
    submission = read_submission(run)
    start = newest_start(run)
    is_local = start is not None and start.is_local
    if submission is not None:
        is_local = submission.cluster != "slurm"
    if is_local:
        raise DependencyError(
            f"{run.run_id} runs on this machine without Slurm, which cannot wait for it; wait for its end"
        )
    job_id = submitted_as if start is None else start.job_id
    if submission is not None and submission.job_id:
        # The jobs of a chain end in their order.
        job_id = submission.job_ids[-1]
    if job_id is None:
        raise DependencyError(f"{run.run_id} was never submitted; submit it first")
    return job_id


def _has_job_left(job_id: str, job_ids: Sequence[str], option: str, environment: Mapping[str, str]) -> bool:
    """Return whether a job, or an element of an array, has not ended yet.

    Args:
        job_ids: the jobs of the runs; the array may have others.
    """
    records = commands.show_array(job_id, environment=environment)
    if not records:
        raise DependencyError(
            f"Slurm does not know job {job_id} any more, and a job that waits for it would start at once; find out "
            f"how the run ended, and leave {option} out"
        )
    has_job_left = False
    for record in records:
        state = record["JobState"]
        element = job_id
        if "ArrayJobId" in record:
            element = f"{record['ArrayJobId']}_{record.get('ArrayTaskId')}"
        if state not in ENDED_STATES:
            has_job_left = True
        elif option == AFTER and state != "COMPLETED" and element in job_ids:
            raise DependencyError(
                f"job {element} is {state}, so the run will not finish; continue it first, with hpcddp submit "
                f"--resume RUN, or use {AFTER_ANY}"
            )
    return has_job_left
