"""The built-in training: model, data, optimizer and how it computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from hpcddp.spec.fields import DatasetName, FunctionReference, Line, ModelName, Section

Device = Literal["cuda", "cpu"]
BatchNorm = Literal["local", "sync"]
Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp64"]
LossReduction = Literal["mean", "sum", "per_sample", "global"]
LARGEST_SEED = 2**63 - 1

Beta = Annotated[float, Field(ge=0, lt=1)]


class Optimizer(Section):
    """The optimizer and its constants."""

    name: Literal["sgd", "adamw"] = Field("sgd", description="Which optimizer.")
    momentum: float = Field(0.0, ge=0, lt=1, description="Momentum of SGD.")
    weight_decay: float = Field(0.0, ge=0, description="Weight decay of SGD or AdamW.")
    nesterov: bool = Field(default=False, description="Whether SGD uses Nesterov's momentum.")
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = Field((0.9, 0.999), description="Betas of AdamW.")
    eps: float = Field(1e-8, gt=0, description="Epsilon of AdamW.")


class Train(Section):
    """The built-in training of an image classifier."""

    model: ModelName = Field(description="A torchvision classification model, or your own `pkg.module:function`.")
    model_args: Mapping[str, Any] = Field(
        default_factory=dict, description="Arguments passed on to the model's function."
    )
    dataset: DatasetName = Field(
        description="`digits`, `cifar10`, `imagefolder`, `synthetic`, or your own `pkg.module:function`."
    )
    dataset_args: Mapping[str, Any] = Field(
        default_factory=dict,
        description=(
            "`cifar10`: `augment` (true; never of the validation part). `imagefolder`: `augment` (true), `image_size` "
            "(224), `resize` (before crops in the centre: 256/224 of it). `synthetic`: `samples` (1024), `val_samples` "
            "(256), `image_size` (32), `num_classes` (10). Your own function is given all of them, and `split`."
        ),
    )
    num_classes: int | None = Field(
        None,
        ge=1,
        description="Outputs of the model. null is the dataset's own number.",
        json_schema_extra={"unit": "classes"},
    )
    data_dir: Line | None = Field(None, description="Where the data lie; `cifar10` and `imagefolder` need it.")
    epochs: int = Field(1, ge=1, description="Passes over the data.", json_schema_extra={"unit": "epochs"})
    optimizer: Optimizer = Field(default_factory=Optimizer, description="The optimizer and its constants.")
    device: Device | None = Field(
        None, description="null is `cuda` where GPUs are asked for; `cpu` runs such a job on gloo (rehearsal, tests)."
    )
    precision: Precision = Field("fp32", description="Number format that the model computes in.")
    batch_norm: BatchNorm = Field(
        "local",
        description=(
            "Whose samples BatchNorm takes its statistics over: `local`, each rank's own micro-batch, or `sync`, "
            "those of all ranks in a micro-step; with accumulation that is not the whole global batch."
        ),
    )
    compile: bool = Field(default=False, description="Whether the model goes through `torch.compile`.")
    channels_last: bool = Field(
        default=False, description="Whether images and weights lie in the channels-last memory format."
    )
    loss: FunctionReference | None = Field(
        None,
        description=(
            "A loss of your own, `pkg.module:function`, from logits `[n, K]` and labels `[n]`. null is cross entropy, "
            "which is what evaluations report in any case."
        ),
    )
    loss_reduction: LossReduction = Field(
        "mean",
        description=(
            "What `loss` does with the samples: their `mean`, their `sum`, or `per_sample`, a vector `[n]`; `global` "
            "is the loss of the global batch, made with a helper of hpcddp. `hpcddp doctor loss` tells."
        ),
    )
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="Label smoothing of the cross entropy.")
    clip_grad_norm: float | None = Field(
        None, gt=0, description="The largest norm of the averaged gradient. null does not clip."
    )
    ema_decay: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Decay of averaged weights, which are then what is evaluated. null averages nothing.",
        json_schema_extra={"unit": "per step"},
    )
    num_workers: int | None = Field(
        None, ge=0, description="Processes that load data, for each rank. null follows the CPUs that the task may use."
    )
    eval_every: int = Field(
        1, ge=1, description="How often the validation part is evaluated.", json_schema_extra={"unit": "epochs"}
    )
    nonfinite_loss: Literal["stop", "skip"] = Field(
        "stop", description="What a loss of NaN or infinity does to the step."
    )
    deterministic: bool = Field(default=False, description="Whether torch uses deterministic algorithms alone.")
    noise_scale: bool = Field(
        default=False,
        description="Whether the gradient noise scale is measured, which tells whether a larger batch would still pay.",
    )
    replica_check_every: int | None = Field(
        None,
        ge=1,
        description="How often the ranks compare their replicas of the model. null never does.",
        json_schema_extra={"unit": "steps"},
    )
    seed: int = Field(
        0, ge=0, le=LARGEST_SEED, description="Seed of weights, order and everything else that is random."
    )
