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
from hpcddp.run.sweep import Sweep, index_of, read_sweep, sweep_of
from hpcddp.slurm import commands
from hpcddp.slurm.job import arrays_of
from hpcddp.slurm.job_environment import Dependency
from hpcddp.slurm.states import ENDED_STATES

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
        """Return the ids of the jobs to wait for; none if every job has ended."""
        sweep = read_sweep(self.run.path)
        if sweep is not None:
            return self._jobs_of_sweep(sweep)
        submitted_as = None
        sweep_of_run = sweep_of(self.run)
        if sweep_of_run is not None:
            submitted_as = sweep_of_run.job_id(index_of(self.run))
        job_id = self._job_left(self.run, submitted_as)
        if job_id is None or not self._waits_for(job_id, self._records(job_id)):
            return []
        return [job_id]

    def _jobs_of_sweep(self, sweep: Sweep) -> list[str]:
        """Return the ids of the arrays whose elements have not ended; of each job if one was resumed by itself."""
        job_ids = []
        was_one_resumed = False
        for index in range(len(sweep.elements)):
            submitted_as = sweep.job_id(index)
            job_id = self._job_left(sweep.run(index), submitted_as)
            if job_id is not None:
                job_ids.append(job_id)
            if job_id not in {None, submitted_as}:
                was_one_resumed = True
        records_of_array = {array: self._records(array) for array in arrays_of(job_ids)}
        waited_for = []
        for job_id in job_ids:
            array, _, _ = job_id.partition("_")
            if self._waits_for(job_id, records_of_array[array]):
                waited_for.append(job_id)
        # The id of an array stands for all its elements, unless one of them was resumed as another job.
        return waited_for if was_one_resumed else arrays_of(waited_for)

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

    def _records(self, job_id: str) -> list[dict[str, str]]:
        """Return Slurm's records of a job."""
        records = commands.show_array(job_id, environment=self.environment)
        if not records:
            self._refuse_unknown(job_id)
        return records

    def _waits_for(self, job_id: str, records: Sequence[Mapping[str, str]]) -> bool:
        """Return whether a job has not ended yet."""
        state = next((record["JobState"] for record in records if _is_about(record, job_id)), None)
        if state is not None and state not in ENDED_STATES:
            return True
        if self.option == AFTER_ANY:
            return False
        if state is None:
            self._refuse_unknown(job_id)
        if state != "COMPLETED":
            self._refuse(
                f"job {job_id} is {state}, so the run will not finish; continue it first, with hpcddp submit "
                f"--resume RUN, or use {AFTER_ANY}"
            )
        return False

    def _refuse_unknown(self, job_id: str) -> NoReturn:
        self._refuse(
            f"Slurm does not know job {job_id} any more, and a job that waits for it would start at once; find out "
            f"how the run ended, and leave {self.option} out"
        )

    def _refuse(self, why: str) -> NoReturn:
        raise DependencyError(f"{self.option} {self.run.run_id}: {why}")


def _is_about(record: Mapping[str, str], job_id: str) -> bool:
    """Return whether a record of ``scontrol show job`` describes a job or its array."""
    array, _, index = job_id.partition("_")
    if not index:
        return True
    if record.get("ArrayJobId") != array:
        return False
    return any(_holds(part, int(index)) for part in record.get("ArrayTaskId", "").partition("%")[0].split(","))


def _holds(part: str, index: int) -> bool:
    """Return whether a part of an array expression (``4``, ``4-9`` or ``0-8:2``) contains an index."""
    span, _, step = part.partition(":")
    first, _, last = span.partition("-")
    if not first.isdecimal():
        return False
    return index in range(int(first), int(last or first) + 1, int(step or 1))
