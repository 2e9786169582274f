"""The job file as one frozen value, with the properties that follow from its fields."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Literal

from pydantic import Field

from hpcddp.errors import UserError
from hpcddp.jobfile.environment import Environment
from hpcddp.jobfile.fields import FunctionReference, Line, Name, ProfileName, Section, SweepField, Text
from hpcddp.jobfile.resources import Resources
from hpcddp.jobfile.sections import (
    Batch,
    Checkpoint,
    Launch,
    LearningRate,
    Requeue,
    Trackers,
    Train,
)


class JobSpec(Section):
    """A job file; the names of the fields are the keys of the file."""

    name: Name = Field(description="Name of the job and of its directory under `run_root`.")
    run_root: Line = Field(
        "runs",
        description="Directory of all runs, seen by every node. A relative one is below the directory of submission.",
    )
    profile: ProfileName | None = Field(
        None, description="Name of a cluster profile. null is `default`, if there is one."
    )
    resources: Resources = Field(
        default_factory=Resources, description="The resources that the job requests from Slurm."
    )
    environment: Environment = Field(default_factory=Environment, description="The environment of the tasks.")
    batch: Batch = Field(default_factory=Batch, description="The global batch and its split.")
    learning_rate: LearningRate = Field(default_factory=LearningRate, description="The learning rate.")
    train: Train | None = Field(None, description="The built-in training.")
    entrypoint: FunctionReference | None = Field(
        None, description="Your own function in place of `train`: every rank calls it with an `hpcddp.Context`."
    )
    command: Annotated[tuple[Text, ...], Field(strict=False)] | None = Field(
        None, description="Your own program in place of `train`, word by word: every task runs it."
    )
    checkpoint: Checkpoint = Field(default_factory=Checkpoint, description="When a checkpoint is written.")
    requeue: Requeue = Field(default_factory=Requeue, description="When the job is requeued.")
    launch: Launch = Field(default_factory=Launch, description="How long ranks wait for each other.")
    trackers: Trackers = Field(default_factory=Trackers, description="Trackers that show the metrics.")
    sweep: SweepField = Field(
        None,
        description=(
            "Values of fields, `{train.seed: 0..4, learning_rate.base: [0.1, 0.2]}`: one run for each combination, all "
            "in one job array. Or a list of mappings, one run each."
        ),
    )
    max_parallel: int | None = Field(None, ge=1, description="How many elements of the sweep run at once. null is all.")

    @property
    def global_batch_size(self) -> int:
        """The global batch.

        Raises:
            UserError: the job does not give one.
        """
        if self.batch.global_batch_size is None:
            raise UserError(
                f"batch.global_batch_size is missing in the job {self.name}; write how many samples a step has"
            )
        return self.batch.global_batch_size

    @property
    def tasks_per_node(self) -> int:
        """Ranks on each node: as given, else one for each GPU, else one."""
        return self.resources.tasks_per_node or self.resources.gpus_per_node or 1

    @property
    def world_size(self) -> int:
        """Ranks in the job."""
        return self.resources.nodes * self.tasks_per_node

    @property
    def uses_gpus(self) -> bool:
        """Whether the job asks for GPUs."""
        return self.resources.gpus_per_node > 0

    @property
    def signal_lead(self) -> timedelta | None:
        """Time before the limit at which Slurm signals the job: the default is at most half of the limit."""
        lead, limit = self.requeue.signal_lead, self.resources.time_limit
        if lead is None or limit is None or limit.seconds is None or lead.total_seconds() < limit.seconds:
            return lead
        return timedelta(seconds=limit.seconds // 2) or None

    @property
    def device(self) -> Literal["cuda", "cpu"]:
        """Device of the ranks: ``train.device``, else ``cuda`` if the job requests GPUs."""
        if self.train is not None and self.train.device is not None:
            return self.train.device
        return "cuda" if self.uses_gpus else "cpu"
