"""The last step of a submission: give a run's script to sbatch, or start it on this machine."""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpcddp.jobfile.cluster import Cluster
from hpcddp.run.directory import RunDirectory
from hpcddp.run.job_records import SubmissionRecord, read_submission, write_submission_record
from hpcddp.run.ownership import group_writable_warnings, identity
from hpcddp.slurm.job_environment import ArrayPlace, submission_environment
from hpcddp.submit.request import SubmitRequest

if TYPE_CHECKING:
    from submitit import Job

_DEFAULT_SIGNAL_LEAD_S = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A submitted job.

    Args:
        run: its run directory.
        cluster: ``slurm``, or ``local`` for a run on this machine.
        job: submitit's job.
        dropped: names of inherited variables that sbatch did not get, because they would override directives.
        epochs: the epochs of the training.
        first_attempt: the number of the job's first attempt.
        notes: what may keep the job from running, a sentence each.
    """

    run: RunDirectory
    cluster: Cluster
    job: Job[Any]
    dropped: tuple[str, ...]
    epochs: int
    first_attempt: int = 0
    notes: tuple[str, ...] = ()

    @property
    def job_id(self) -> str:
        """Slurm's job id, or the process id of a local run."""
        return str(self.job.job_id)

    @property
    def warnings(self) -> list[str]:
        """Warnings for the user, a sentence each."""
        return [*self.notes, *group_writable_warnings(self.run.path)]

    def as_json(self) -> dict[str, Any]:
        """Return what ``submit --json`` prints."""
        return {
            "run_id": self.run.run_id,
            "job_id": self.job_id,
            "run_dir": str(self.run.path),
            "cluster": self.cluster,
            "dropped_environment": list(self.dropped),
            "warnings": self.warnings,
        }


def submit_script(
    run: RunDirectory,
    request: SubmitRequest,
    script: str,
    *,
    element: ArrayPlace | None = None,
    notes: tuple[str, ...] = (),
) -> Submission:
    """Give a script to sbatch, or start it on this machine, and record the submission in the run directory.

    Args:
        run: the run's directory, with all that the script needs.
        request: the request that the script is rendered from.
        script: the text of the script.
        element: the element of a sweep to run as an array of one, where the script is that of the whole sweep.
        notes: what may keep the job from running, a sentence each.

    Raises:
        HpcddpError: the job could not be submitted.
    """
    from hpcddp.submit import executors
    from hpcddp.task import work

    spec, cluster, directory, python = request.job.spec, request.cluster, request.directory, request.python
    clean, dropped = submission_environment(request.environment)
    executor: executors.RenderedSlurmExecutor | executors.RenderedLocalExecutor
    if cluster == "slurm":
        executor = executors.RenderedSlurmExecutor(
            run.submitit,
            script=script,
            tasks=spec.world_size,
            environment=clean,
            directory=directory,
            dependency=request.dependency,
            element=element,
        )
    else:
        limit, lead = spec.resources.time_limit, spec.signal_lead
        executor = executors.RenderedLocalExecutor(
            run.submitit,
            script=run.script,
            log=run.batch_log,
            command=shlex.join([python, "-P", "-u", "-m", "hpcddp.task"]),
            tasks=spec.tasks_per_node,
            time_limit_s=limit.seconds if limit else None,
            signal_lead_s=int(lead.total_seconds()) if lead else _DEFAULT_SIGNAL_LEAD_S,
            environment=clean,
            directory=directory,
        )
    # Read before the submission, because the job may begin at once.
    newest, before = run.newest_attempt(), read_submission(run)
    job = executor.submit(work.run, str(run.path))
    record = SubmissionRecord(
        cluster=cluster,
        job_id=str(job.job_id),
        directory=str(directory),
        python=python,
        time=time.time(),
        sweep=None if before is None else before.sweep,
        index=None if before is None else before.index,
        **identity(run.path),
    )
    write_submission_record(run, record)
    return Submission(
        run=run,
        cluster=cluster,
        job=job,
        dropped=dropped if cluster == "slurm" else (),
        epochs=spec.train.epochs if spec.train else 1,
        first_attempt=0 if newest is None else newest + 1,
        notes=notes,
    )
