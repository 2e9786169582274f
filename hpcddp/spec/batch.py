"""The batch and the learning rate, as the user states them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.config import JsonDict

from hpcddp.spec.fields import FunctionReference, Section

Tail = Literal["keep", "drop", "wrap"]
Split = Literal["exact", "error"]
Order = Literal["keyed", "torch"]
Unit = Literal["sample", "group"]
Rule = Literal["none", "linear", "sqrt"]
Schedule = Literal["constant", "cosine", "step"]

# Sample counts stay exact in JSON and in a 64-bit index.
LARGEST_BATCH = 2**31 - 1
SAMPLES: JsonDict = {"unit": "samples"}


class Batch(Section):
    """Who gets how many samples: the global batch, and how it is split."""

    global_batch_size: int | None = Field(
        None,
        ge=1,
        le=LARGEST_BATCH,
        description="Samples per optimizer step, over all ranks. `train` needs it; a `command` or an `entrypoint` is "
        "told what follows from it.",
        json_schema_extra=SAMPLES,
    )
    max_per_device_batch_size: int | None = Field(
        None,
        ge=1,
        le=LARGEST_BATCH,
        description="The most samples in one forward on one device; accumulation follows from it.",
        json_schema_extra=SAMPLES,
    )
    grad_accum_steps: int | None = Field(
        None,
        ge=1,
        le=LARGEST_BATCH,
        description="Backward passes per optimizer step. null is what `max_per_device_batch_size` needs.",
        json_schema_extra={"unit": "micro-steps"},
    )
    per_device_batch_size: int | None = Field(
        None,
        ge=1,
        le=LARGEST_BATCH,
        description="Samples in every forward, held fixed (ghost batch norm): `grad_accum_steps` follows from it, and "
        "the world size times it must divide the global batch.",
        json_schema_extra=SAMPLES,
    )
    tail: Tail = Field(
        "keep",
        description="The last batch of an epoch: `keep` it smaller, `drop` it, or `wrap` around to the beginning.",
    )
    split: Split = Field(
        "exact",
        description="A batch that the ranks do not divide: `exact` gives uneven, weighted shares; `error` refuses.",
    )
    order: Order = Field(
        "keyed",
        description="Order of the samples: `keyed` permutation, or `torch`, which is `randperm(seed + epoch)`.",
    )
    unit: Unit = Field(
        "sample",
        description="What the sizes above count: samples, or `group`s of samples, which are never split between ranks.",
    )
    group: FunctionReference | None = Field(
        None,
        description="With `unit: group`: gets the index of a training sample, returns its group, a whole number or "
        "a text.",
    )


class LearningRate(Section):
    """The learning rate, over the whole training."""

    base: float = Field(0.1, gt=0, description="Learning rate after warm-up.", json_schema_extra={"unit": "per step"})
    base_global_batch_size: int | None = Field(
        None,
        ge=1,
        le=LARGEST_BATCH,
        description="Global batch that `base` was tuned for. null is this job's own batch.",
        json_schema_extra=SAMPLES,
    )
    rule: Rule = Field(
        "none",
        description="How `base` follows kappa, the global batch over the one that it was tuned for: `linear` times "
        "kappa (SGD), `sqrt` times its square root (with AdamW also betas and eps), `none` not at all.",
    )
    warmup_epochs: float = Field(
        0.0, ge=0, description="Length of the linear warm-up.", json_schema_extra={"unit": "epochs"}
    )
    schedule: Schedule = Field("constant", description="What follows the warm-up.")
    milestones: Annotated[tuple[int, ...], Field(strict=False)] = Field(
        (), description="Epochs at which `schedule: step` multiplies by `gamma`.", json_schema_extra={"unit": "epochs"}
    )
    gamma: float = Field(0.1, gt=0, le=1, description="Factor at each milestone of `schedule: step`.")
    min: float = Field(
        0.0,
        ge=0,
        description="Learning rate that `cosine` and `step` do not go below; a rule scales it along with `base`.",
        json_schema_extra={"unit": "per step"},
    )
