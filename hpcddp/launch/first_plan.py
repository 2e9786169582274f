"""The batch plan that a run begins with, as far as it is known without reading data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hpcddp.run.directory import RunDirectory
from hpcddp.run.files import write_json

if TYPE_CHECKING:
    from hpcddp.batch.job import JobPlan
    from hpcddp.spec.job import JobSpec


def write_first_plan(run: RunDirectory, spec: JobSpec) -> None:
    """Write the plan into a run's directory; a job that states no batch has none."""
    if spec.batch.global_batch_size is not None:
        write_json(run.plan, first_plan(spec).as_json())


def first_plan(spec: JobSpec) -> JobPlan:
    """Return the plan as far as it is known without reading data; the task completes it.

    Raises:
        UserError: there is no plan for the job.
    """
    from hpcddp.batch.job import plan_job
    from hpcddp.batch.samples import TABLED_DATASETS, count_samples

    train = spec.train
    if spec.command is not None:
        return plan_job(spec, samples=None)
    if train is None or train.dataset not in TABLED_DATASETS or spec.batch.unit == "group":
        return plan_job(spec, samples=None, notes=["The task counts the training data and completes this plan."])
    counted = count_samples(train, directory=Path(), python="")
    return plan_job(spec, samples=counted.samples)
