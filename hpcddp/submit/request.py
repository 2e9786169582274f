"""The request to submit one job: the value that goes from the command line to the script and to Slurm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from hpcddp.jobfile.cluster import Cluster
from hpcddp.jobfile.read import ResolvedJob
from hpcddp.jobfile.sweep import SweepTable, tabulate
from hpcddp.jobfile.write import dump_job
from hpcddp.run.directory import RunDirectory
from hpcddp.submit.first_plan import first_plan

if TYPE_CHECKING:
    from hpcddp.batch.job import JobPlan


@dataclass(frozen=True, kw_only=True)
class SubmitRequest:
    """A job, and everything about its submission that the job file does not say.

    What is derived from these values is computed once, when it is first used.

    Args:
        job: the resolved job.
        run_id: the id of its run or sweep; None for a script that is given to sbatch by hand, which derives the id
            from the job id.
        cluster: ``slurm``, or ``local`` for a run on this machine.
        python: the interpreter of the tasks.
        template: the sbatch template's name or path; None is the default one.
        directory: the directory of submission; relative paths in the job are relative to it.
        environment: the submitter's environment.
        dependency: the value of sbatch's ``--dependency``; None waits for nothing.
    """

    job: ResolvedJob
    run_id: str | None
    cluster: Cluster
    python: str
    template: str | None
    directory: Path
    environment: Mapping[str, str]
    dependency: str | None = None

    @property
    def run(self) -> RunDirectory:
        """The directory of its run or sweep.

        Raises:
            ValueError: the request has no run id.
        """
        if self.run_id is None:
            raise ValueError("a script that is given to sbatch by hand has no run directory before it starts")
        return RunDirectory(Path(self.job.spec.run_root).absolute() / self.job.spec.name / self.run_id)

    @cached_property
    def job_text(self) -> str:
        """The resolved job as YAML, without the values of its environment variables."""
        return dump_job(self.job.spec, environment_values=False)

    @cached_property
    def plan(self) -> JobPlan | None:
        """The batch plan as far as it is known without reading data; None for a job that states no batch.

        Raises:
            UserError: the batch cannot be split as the job asks.
        """
        return first_plan(self.job.spec)

    @cached_property
    def sweep_table(self) -> SweepTable | None:
        """The elements of its sweep; None for a single run."""
        return None if self.job.spec.sweep is None else tabulate(self.job.spec.sweep)
