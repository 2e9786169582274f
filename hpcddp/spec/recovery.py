"""Checkpoints, requeue and the limits on how long ranks wait for each other."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Literal

from pydantic import Field

from hpcddp.spec.fields import Section
from hpcddp.spec.timefields import Duration, Every, EveryField

Cause = Literal["preemption", "time_limit", "node_failure"]
ALL_CAUSES: tuple[Cause, ...] = ("preemption", "time_limit", "node_failure")


class Checkpoint(Section):
    """When the training is saved, and what is kept."""

    every: EveryField = Field(
        Every(duration=timedelta(minutes=10)),
        description="How often a checkpoint is written, besides at the end of each epoch: "
        "a duration (`10min`), `{steps: 500}` or `{epochs: 1}`.",
    )
    keep: int = Field(3, ge=2, description="Checkpoints that stay on disk.", json_schema_extra={"unit": "checkpoints"})


class Requeue(Section):
    """When the same job runs again, and how often."""

    causes: Annotated[tuple[Cause, ...], Field(strict=False)] = Field(
        ALL_CAUSES, description="Which ends lead to a requeue."
    )
    signal_lead: Duration | None = Field(
        timedelta(seconds=120),
        description="How long before the time limit Slurm warns the job (`--signal=USR2@N`). null writes no directive; "
        "the default is half of a time limit that is shorter than it.",
    )
    max_preemptions: int | None = Field(
        None, ge=0, description="Preemptions before the run gives up; null has no limit."
    )
    max_time_limits: int = Field(50, ge=0, description="Time limits reached before the run gives up.")
    max_failures: int = Field(0, ge=0, description="Infrastructure failures that are requeued.")
    max_attempts_without_progress: int = Field(
        2, ge=1, description="Attempts without a new step before the run gives up."
    )
    expedite: bool = Field(
        default=True, description="Whether the job comes back in seconds instead of Slurm's two minutes."
    )
    allow_continuation: bool = Field(
        default=False, description="Whether a new job may continue the run where requeue is forbidden."
    )

    @property
    def left_to_slurm(self) -> bool:
        """Whether Slurm may requeue the job by itself, which it does after a preemption and after a node failure."""
        return bool({"preemption", "node_failure"} & set(self.causes))


class Launch(Section):
    """How long the ranks wait for each other."""

    rendezvous_timeout: Duration = Field(
        timedelta(minutes=5), description="How long the ranks wait for each other at the start."
    )
    hang_timeout: Duration = Field(
        timedelta(minutes=5),
        description="How long a rank may take from one step to the next before the job ends; ten times the longest "
        "wait so far if that is more, and at least half an hour before the first step, which may compile.",
    )
