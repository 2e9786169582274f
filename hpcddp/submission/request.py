"""The request to submit one job: the value that goes from the command line to the script and to Slurm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hpcddp.errors import UserError
from hpcddp.jobfile.cluster import Cluster
from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.read import ResolvedJob
from hpcddp.jobfile.sweep import Elements, elements_of
from hpcddp.jobfile.write import dump_job
from hpcddp.run.directory import RunDirectory
from hpcddp.run.job_records import write_plan_record
from hpcddp.slurm.job_environment import NO_DEPENDENCY, Dependency

if TYPE_CHECKING:
    from hpcddp.batch.job import JobPlan


CodeChoice = Literal["now", "submitted"]
"""With which code a run is resumed: that of the project now, or that of the submission."""


class SubmissionError(UserError):
    """A job that cannot be submitted as it is."""

    kind = "submission"


@dataclass(frozen=True, kw_only=True)
class SubmitRequest:
    """A job, and everything about its submission that the job file does not say.

    What is derived from these values is computed once, when it is first used.

    Args:
        run_id: the id of its run or sweep; None for a script that is given to sbatch by hand, which derives the id
            from the job id.
        cluster: ``slurm``; ``local`` for a run on this machine; ``here`` for one in the allocation of this shell.
        python: the interpreter of the tasks.
        template: the sbatch template's name or path; None is the default one.
        directory: the directory of submission; relative paths in the job are relative to it.
        environment: the submitter's environment.
        dependency: what the job waits for.
        chain: how many jobs go on with the run one after another; None is one job, which is requeued.
        force: whether to submit although this machine shows an obstacle that its nodes may not have.
        code: with which code a run is resumed; None leaves that to ``environment.code``.
    """

    job: ResolvedJob
    run_id: str | None
    cluster: Cluster
    python: str
    template: str | None
    directory: Path
    environment: Mapping[str, str]
    dependency: Dependency = NO_DEPENDENCY
    chain: int | None = None
    force: bool = False
    code: CodeChoice | None = None

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

    @property
    def all_dependencies(self) -> Dependency:
        """What the job waits for, with ``resources.sbatch.dependency``: sbatch takes an option in place of that."""
        written = self.job.spec.resources.sbatch.get("dependency")
        return self.dependency if written is None else self.dependency.also(str(written))

    @cached_property
    def elements(self) -> Elements:
        """The elements of its sweep; none for a single run."""
        return elements_of(self.job.spec.sweep or ())


def first_plan(spec: JobSpec) -> JobPlan | None:
    """Return the plan of a job, of a range of nodes for the largest number; None for a job that states no batch.

    Raises:
        UserError: the batch cannot be split as the job asks, with one of the numbers of nodes.
    """
    if spec.batch.global_batch_size is None:
        return None
    # Every batch script imports this module at its start, and only the first attempt of a sweep's element plans.
    from hpcddp.batch.job import plan_each_node_count

    plans = plan_each_node_count(spec, _first_plan_of_size)
    return plans[spec.nodes]


def _first_plan_of_size(spec: JobSpec) -> JobPlan:
    from hpcddp.batch.job import plan_job
    from hpcddp.batch.samples import count_without_data

    if spec.command is not None:
        return plan_job(spec, samples=None)
    train = spec.train
    counted = None if train is None or spec.batch.unit == "group" else count_without_data(train)
    if counted is None:
        return plan_job(spec, samples=None, notes=["The task counts the training data and completes this plan."])
    return plan_job(spec, samples=counted.samples)


def write_plan(run: RunDirectory, plan: JobPlan | None, *, total_steps: int | None = None) -> None:
    """Write the plan into a run's directory; a job that states no batch has none.

    ``total_steps`` are the steps of a training that goes on with another batch, whose plan does not know them.
    """
    if plan is None:
        return
    document = plan.as_json()
    if total_steps is not None:
        document["total_steps"] = total_steps
    write_plan_record(run, document)


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """Something that keeps a job from running, or may do so.

    Args:
        sentence: what it is, and what to do instead.
        certain: whether the job cannot run; False where that depends on the nodes that the job gets.
        can_force: whether ``--force`` submits the job all the same, since the nodes may be different.
    """

    sentence: str
    certain: bool = True
    can_force: bool = True


Check = Callable[[JobSpec, Cluster, Mapping[str, str]], Iterator[Obstacle]]
"""Yields the obstacles to a job, given the job, its cluster and the submitter's environment."""
