"""Giving a run's script to Slurm, or starting it here."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hpcddp.launch.claim import group_writable_warnings
from hpcddp.run.directory import RunDirectory
from hpcddp.run.files import read_json, write_json
from hpcddp.slurm.inheritance import submission_environment

if TYPE_CHECKING:
    from submitit import Job

    from hpcddp.launch.array import ArrayPlace
    from hpcddp.spec.job import JobSpec

Cluster = Literal["slurm", "local"]

_DEFAULT_SIGNAL_LEAD_S = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A job that was handed over.

    Args:
        run: its run directory.
        cluster: where it went.
        job: submitit's job.
        dropped: inherited variables that sbatch did not get, because they would have overridden directives.
        epochs: how many epochs the run has.
        first_attempt: the number of the first attempt that is this job's.
        notes: what may be in the job's way, a sentence each.
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
        """What the user should know, a sentence each."""
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


def hand_over(
    run: RunDirectory,
    spec: JobSpec,
    *,
    cluster: Cluster,
    script: str,
    python: str,
    directory: Path,
    environment: Mapping[str, str],
    dependency: str | None = None,
    place: ArrayPlace | None = None,
    notes: tuple[str, ...] = (),
) -> Submission:
    """Give a script to Slurm, or start it here, and write down where it went.

    Args:
        run: the run's directory, with all that the script needs in it.
        spec: the run's job.
        cluster: where it goes.
        script: the script.
        python: the interpreter that the tasks run.
        directory: the directory of submission, which the script's relative paths mean.
        environment: the submitter's environment.
        dependency: what it waits for, in sbatch's words; None waits for nothing.
        place: which element of a sweep it is, whose script this is; None is none.
        notes: what may be in the job's way, a sentence each.

    Raises:
        HpcddpError: the job could not be handed over.
    """
    from hpcddp.launch import executors, work

    clean, dropped = submission_environment(environment)
    executor: executors.RenderedSlurmExecutor | executors.RenderedLocalExecutor
    if cluster == "slurm":
        executor = executors.RenderedSlurmExecutor(
            run.submitit,
            script=script,
            tasks=spec.world_size,
            environment=clean,
            directory=directory,
            dependency=dependency,
            place=place,
        )
    else:
        limit, lead = spec.resources.time_limit, spec.signal_lead
        executor = executors.RenderedLocalExecutor(
            run.submitit,
            script=run.script,
            log=run.batch_log,
            command=shlex.join([python, "-P", "-u", "-m", "hpcddp.launch.task"]),
            tasks=spec.tasks_per_node,
            time_limit_s=limit.seconds if limit else None,
            signal_lead_s=int(lead.total_seconds()) if lead else _DEFAULT_SIGNAL_LEAD_S,
            environment=clean,
            directory=directory,
        )
    # Asked before, since the job may begin at once.
    newest = run.newest_attempt()
    job = executor.submit(work.run, str(run.path))
    document = {"cluster": cluster, "job_id": str(job.job_id), "directory": str(directory), "python": python}
    before = read_json(run.submission) or {}
    origin = {name: before[name] for name in ("sweep", "index") if name in before}
    write_json(run.submission, {**document, "time": time.time(), **origin})
    return Submission(
        run=run,
        cluster=cluster,
        job=job,
        dropped=dropped if cluster == "slurm" else (),
        epochs=spec.train.epochs if spec.train else 1,
        first_attempt=0 if newest is None else newest + 1,
        notes=notes,
    )
