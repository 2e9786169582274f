"""What shows the curves of a run beside its own files."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from hpcddp.spec.fields import Line, Section, refusal

TrackerName = Literal["tensorboard", "wandb", "mlflow"]


def _each_once(names: tuple[TrackerName, ...]) -> tuple[TrackerName, ...]:
    if len(set(names)) < len(names):
        raise refusal("a tracker is named twice", "name each once")
    return names


class Trackers(Section):
    """What shows the records of `metrics.jsonl` while the training runs: one curve over all attempts of a run."""

    use: Annotated[tuple[TrackerName, ...], Field(strict=False), AfterValidator(_each_once)] | None = Field(
        None,
        description="`tensorboard`, `wandb` (Weights & Biases), `mlflow`. null is `[tensorboard]` where it is "
        "installed; `[]` is none.",
    )
    project: Line | None = Field(None, description="Project of W&B, experiment of MLflow. null is the job's name.")
    entity: Line | None = Field(None, description="Team or user of W&B. null is the key's own.")
    tracking_uri: Line | None = Field(
        None, description="Server of MLflow, or its own database. null is `MLFLOW_TRACKING_URI`."
    )
