"""The batch plan at submission: as far as it is known without reading data. The task completes it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hpcddp.run.directory import RunDirectory
from hpcddp.run.metrics import write_plan_record

if TYPE_CHECKING:
    from hpcddp.batch.job import JobPlan
    from hpcddp.jobfile.job import JobSpec


def first_plan(spec: JobSpec) -> JobPlan | None:
    """Return the plan of a job; None for a job that states no batch.

    Raises:
        UserError: the batch cannot be split as the job asks.
    """
    # Every batch script imports this module at its start, and only the first attempt of a sweep's element plans.
    from hpcddp.batch.job import plan_job
    from hpcddp.batch.samples import TABLED_DATASETS, count_samples

    train = spec.train
    if spec.batch.global_batch_size is None:
        return None
    if spec.command is not None:
        return plan_job(spec, samples=None)
    if train is None or train.dataset not in TABLED_DATASETS or spec.batch.unit == "group":
        return plan_job(spec, samples=None, notes=["The task counts the training data and completes this plan."])
    counted = count_samples(train, directory=Path(), python="")
    return plan_job(spec, samples=counted.samples)


def write_plan(run: RunDirectory, plan: JobPlan | None) -> None:
    """Write the plan into a run's directory; a job that states no batch has none."""
    if plan is not None:
        write_plan_record(run, plan.as_json())
