"""The dependencies of a new job on runs: ``--after RUN`` and ``--after-any RUN``.

Slurm starts a job at once if it depends on a job that Slurm does not know (sbatch(1), ``--dependency``), so each run is
looked up first. A requeued job keeps its job id, so a job that waits for it continues to wait. Slurm waits for the end
of the jobs alone; the start of the job looks whether the runs of ``--after`` have finished.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

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
            left = _RunToWaitFor(option=option, run=run, environment=environment).jobs()
            jobs += left
            if not left:
                notes.append(f"{option} {run.run_id}: it has ended already, and is not waited for")
            elif option == AFTER:
                runs.append(str(run.path.absolute()))
    conditions = (":".join(["afterany", *dict.fromkeys(jobs)]),) if jobs else ()
    return Dependency(conditions=conditions, runs=tuple(dict.fromkeys(runs))), notes


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunToWaitFor:
    """A run or sweep that a job waits for.

    Args:
        option: ``--after`` or ``--after-any``.
        run: the directory of the run or sweep.
    """

    option: str
    run: RunDirectory
    environment: Mapping[str, str]

    def jobs(self) -> list[str]:
        """Return the ids of the jobs to wait for, that of the array for the elements of a sweep; none if all ended."""
        sweep = read_sweep(self.run.path)
        if sweep is None:
            sweep_of_run = sweep_of(self.run)
            submitted_as = None if sweep_of_run is None else sweep_of_run.job_id(index_of(self.run))
            left = [self._job_left(self.run, submitted_as)]
        else:
            indices = range(len(sweep.elements))
            left = [self._job_left(sweep.run(index), sweep.job_id(index)) for index in indices]
        job_ids = [job_id for job_id in left if job_id is not None]
        asked = job_ids if sweep is None else arrays_of(job_ids)
        return [job_id for job_id in asked if self._waits_for(job_id, job_ids)]

    def _job_left(self, run: RunDirectory, submitted_as: str | None) -> str | None:
        """Return the newest job of a run; None if the run has ended."""
        result = read_result(run)
        if result is not None:
            if result.status == FINISHED or self.option == AFTER_ANY:
                return None
            self._refuse(
                f"{run.run_id} has ended as {result.status} ({result.reason}), so it will not finish; "
                f"continue it first: {resume_command(run)}, or use {AFTER_ANY}"
            )
        submission = read_submission(run)
        start = newest_start(run)
        is_local = start is not None and start.is_local
        if submission is not None:
            is_local = submission.cluster != "slurm"
        if is_local:
            self._refuse(f"{run.run_id} runs on this machine without Slurm, which cannot wait for it; wait for its end")
        job_id = submitted_as if start is None else start.job_id
        if submission is not None and submission.job_id:
            job_id = submission.job_id
        if job_id is None:
            self._refuse(f"{run.run_id} was never submitted; submit it first")
        return job_id

    def _waits_for(self, job_id: str, job_ids: Sequence[str]) -> bool:
        """Return whether a job, or an element of an array, has not ended yet.

        Args:
            job_ids: the jobs of the runs; the array may have others.
        """
        records = commands.show_array(job_id, environment=self.environment)
        if not records:
            self._refuse(
                f"Slurm does not know job {job_id} any more, and a job that waits for it would start at once; find out "
                f"how the run ended, and leave {self.option} out"
            )
        has_job_left = False
        for record in records:
            state = record["JobState"]
            element = job_id
            if "ArrayJobId" in record:
                element = f"{record['ArrayJobId']}_{record.get('ArrayTaskId')}"
            if state not in ENDED_STATES:
                has_job_left = True
            elif self.option == AFTER and state != "COMPLETED" and element in job_ids:
                self._refuse(
                    f"job {element} is {state}, so the run will not finish; continue it first, with hpcddp submit "
                    f"--resume RUN, or use {AFTER_ANY}"
                )
        return has_job_left

    def _refuse(self, why: str) -> NoReturn:
        raise DependencyError(f"{self.option} {self.run.run_id}: {why}")
