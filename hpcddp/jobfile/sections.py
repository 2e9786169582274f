"""The sections `batch`, `learning_rate`, `train`, `checkpoint`, `requeue`, `launch` and `trackers` of a job file."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic.config import JsonDict

from hpcddp.errors import listed
from hpcddp.jobfile.datasets import DATASETS, describe_arguments
from hpcddp.jobfile.field_facts import FieldFacts, Option
from hpcddp.jobfile.fields import (
    BestField,
    DatasetName,
    Duration,
    Every,
    EveryField,
    FunctionReference,
    Line,
    ModelName,
    Section,
    refusal,
)

Tail = Literal["keep", "drop", "wrap"]
Split = Literal["exact", "error"]
OrderName = Literal["keyed", "torch"]
Unit = Literal["sample", "group"]
# Sample counts stay exact in JSON and in a 64-bit index.
LARGEST_BATCH = 2**31 - 1
SAMPLES: JsonDict = {"unit": "samples"}


class Batch(Section):
    """The global batch and its split over ranks and micro-steps."""

    global_batch_size: Annotated[
        int | None,
        FieldFacts(
            option=Option(help="Samples of an optimizer step, over all ranks."),
            on_resume="by name",
            other_names=("batch_size",),
        ),
    ] = Field(
        None,
        ge=1,
        le=LARGEST_BATCH,
        description="Samples per optimizer step, over all ranks. `train` needs it; a `command` or an `entrypoint` is "
        "told what follows from it.",
        json_schema_extra=SAMPLES,
    )
    max_per_device_batch_size: Annotated[int | None, FieldFacts(on_resume="always")] = Field(
        None,
        ge=1,
        le=LARGEST_BATCH,
        description="The most samples in one forward on one device; accumulation follows from it.",
        json_schema_extra=SAMPLES,
    )
    grad_accum_steps: Annotated[int | None, FieldFacts(on_resume="always")] = Field(
        None,
        ge=1,
        le=LARGEST_BATCH,
        description="Backward passes per optimizer step. null is what `max_per_device_batch_size` needs.",
        json_schema_extra={"unit": "micro-steps"},
    )
    per_device_batch_size: Annotated[int | None, FieldFacts(other_names=("micro_batch_size",))] = Field(
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
    split: Annotated[Split, FieldFacts(on_resume="always")] = Field(
        "exact",
        description="A batch that the ranks do not divide: `exact` gives uneven, weighted shares; `error` refuses.",
    )
    order: OrderName = Field(
        "keyed",
        description="Order of the samples: `keyed` permutation, or `torch`, which is `randperm(seed + epoch)`.",
    )
    unit: Unit = Field(
        "sample",
        description="What the sizes above count: samples, or `group`s of samples, which are never split between ranks.",
    )
    group: FunctionReference | None = Field(
        None,
        description="With `unit: group`: gets the index of a training sample, returns its group, an integer or "
        "a string.",
    )


Rule = Literal["none", "linear", "sqrt"]
Schedule = Literal["constant", "cosine", "step"]


class LearningRate(Section):
    """The learning rate, over the whole training."""

    base: Annotated[float, FieldFacts(other_names=("lr",))] = Field(
        0.1,
        gt=0,
        description="Learning rate after warm-up. The default is that of `train`; a command or an entrypoint gets only "
        "a rate that is written.",
        json_schema_extra={"unit": "per step"},
    )
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


_DATASET_NAMES = ", ".join(f"`{name}`" for name in DATASETS)
_IN_FILES = listed([f"`{name}`" for name, dataset in DATASETS.items() if dataset.is_in_files])
Device = Literal["cuda", "cpu"]
BatchNorm = Literal["local", "sync"]
Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp64"]
LossReduction = Literal["mean", "sum", "per_sample", "global"]
LARGEST_SEED = 2**63 - 1
Beta = Annotated[float, Field(ge=0, lt=1)]


class Optimizer(Section):
    """The optimizer and its constants."""

    name: Literal["sgd", "adamw"] = Field("sgd", description="Name of the optimizer.")
    momentum: float = Field(0.0, ge=0, lt=1, description="Momentum of SGD.")
    weight_decay: float = Field(0.0, ge=0, description="Weight decay of SGD or AdamW.")
    nesterov: bool = Field(default=False, description="Whether SGD uses Nesterov's momentum.")
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = Field((0.9, 0.999), description="Betas of AdamW.")
    eps: float = Field(1e-8, gt=0, description="Epsilon of AdamW.")


class Train(Section):
    """The built-in training of an image classifier."""

    model: Annotated[ModelName, FieldFacts(example="resnet18", other_names=("arch",))] = Field(
        description="A torchvision classification model, or your own `pkg.module:function`."
    )
    model_args: Mapping[str, Any] = Field(
        default_factory=dict, description="Arguments passed on to the model's function."
    )
    dataset: Annotated[DatasetName, FieldFacts(example="digits")] = Field(
        description=f"{_DATASET_NAMES}, or your own `pkg.module:function`, which is called with `split`, `train` or "
        "`val`, and returns a map-style data set of pairs: input and label."
    )
    dataset_args: Mapping[str, Any] = Field(
        default_factory=dict,
        description=f"{describe_arguments()} Your own function is given all of them, and `split`.",
    )
    num_classes: int | None = Field(
        None,
        ge=1,
        description="Outputs of the model. null is the dataset's own number.",
        json_schema_extra={"unit": "classes"},
    )
    data_dir: Annotated[Line | None, FieldFacts(on_resume="always", is_expanded=True)] = Field(
        None, description=f"Directory of the data; needed for {_IN_FILES}."
    )
    epochs: Annotated[int, FieldFacts(on_resume="by name")] = Field(
        1, ge=1, description="Passes over the data.", json_schema_extra={"unit": "epochs"}
    )
    optimizer: Optimizer = Field(default_factory=Optimizer, description="The optimizer and its constants.")
    device: Annotated[Device | None, FieldFacts(on_resume="always", ddp_value="cpu")] = Field(
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
    compile: Annotated[bool, FieldFacts(ddp_value=False)] = Field(
        default=False, description="Whether the model goes through `torch.compile`."
    )
    channels_last: Annotated[bool, FieldFacts(ddp_value=False)] = Field(
        default=False, description="Whether images and weights use the channels-last memory format."
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
            "is the loss of the global batch, made with a helper of hpcddp. `hpcddp doctor loss` finds it out."
        ),
    )
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="Label smoothing of the cross entropy.")
    clip_grad_norm: Annotated[float | None, FieldFacts(ddp_value=None)] = Field(
        None, gt=0, description="The largest norm of the averaged gradient. null does not clip."
    )
    ema_decay: Annotated[float | None, FieldFacts(ddp_value=None)] = Field(
        None,
        gt=0,
        lt=1,
        description="Decay of averaged weights, which are then what is evaluated. null averages nothing.",
        json_schema_extra={"unit": "per step"},
    )
    num_workers: Annotated[int | None, FieldFacts(on_resume="always", ddp_value=0, other_names=("workers",))] = Field(
        None, ge=0, description="Processes that load data, for each rank. null follows the CPUs that the task may use."
    )
    eval_every: int = Field(
        1, ge=1, description="How often the validation part is evaluated.", json_schema_extra={"unit": "epochs"}
    )
    nonfinite_loss: Annotated[Literal["stop", "skip"], FieldFacts(ddp_value="stop")] = Field(
        "stop", description="Treatment of a step whose loss is NaN or infinite."
    )
    deterministic: Annotated[bool, FieldFacts(ddp_value=False)] = Field(
        default=False, description="Whether torch uses deterministic algorithms only."
    )
    replica_check_every: Annotated[int | None, FieldFacts(ddp_value=None)] = Field(
        None,
        ge=1,
        description="How often the ranks compare their replicas of the model. null never does.",
        json_schema_extra={"unit": "steps"},
    )
    seed: int = Field(
        0, ge=0, le=LARGEST_SEED, description="Seed of weights, order and everything else that is random."
    )


Cause = Literal["preemption", "time_limit", "node_failure"]
ALL_CAUSES: tuple[Cause, ...] = ("preemption", "time_limit", "node_failure")


class Checkpoint(Section):
    """When a checkpoint is written, and how many are kept."""

    every: EveryField = Field(
        Every(duration=timedelta(minutes=10)),
        description="How often a checkpoint is written, besides at the end of each epoch: "
        "a duration (`10min`), `{steps: 500}` or `{epochs: 1}`.",
    )
    keep: int = Field(3, ge=2, description="Checkpoints that stay on disk.", json_schema_extra={"unit": "checkpoints"})
    best: BestField | None = Field(
        None,
        description="Metric of the evaluations: the checkpoint of its best value also stays on disk, as "
        "`checkpoints/best`. Its name (`val_accuracy`), or `{metric: val_f1, mode: max}`; without `mode` the smallest "
        "value of a loss, an error or a perplexity is the best, and the largest of any other metric.",
    )


CommandSignal = Literal["USR1", "USR2", "INT", "HUP", "TERM"]


class Requeue(Section):
    """When a job is requeued, and how often."""

    causes: Annotated[tuple[Cause, ...], Field(strict=False)] = Field(
        ALL_CAUSES, description="Causes of an end after which the job is requeued."
    )
    signal_lead: Duration | None = Field(
        timedelta(seconds=120),
        description="How long before the time limit Slurm warns the job (`--signal=USR2@N`). null writes no directive; "
        "the default is half of a time limit that is shorter than it.",
    )
    command_signal: CommandSignal | None = Field(
        None,
        description="Signal after which the program of a `command` saves: it gets it when the time limit is near, and "
        "before SIGTERM. null is SIGUSR2, or for a program that does not handle it SIGUSR1, or else SIGTERM.",
    )
    max_preemptions: int | None = Field(
        None, ge=0, description="Largest number of requeues after a preemption; null has no limit."
    )
    max_time_limits: int = Field(50, ge=0, description="Largest number of requeues after the time limit.")
    max_failures: int = Field(
        0, ge=0, description="Infrastructure failures after which the run goes on, as `recovery` says."
    )
    recovery: Literal["restart", "requeue"] = Field(
        "restart",
        description="How the run goes on after such a failure. `restart` starts the tasks again in the same job, which "
        "keeps its nodes; where that is not possible, the job is requeued. `requeue` always gives the nodes back.",
    )
    max_attempts_without_progress: int = Field(
        2, ge=1, description="Attempts without a new step, after which the run stops."
    )
    avoid_failed_nodes: bool = Field(
        default=False,
        description="Whether a requeued job keeps away, for 24 hours, from nodes that were lost, had a hardware error "
        "of a GPU (ECC, NVLink), or were twice the first to fail. On such a node the tasks are not started again in "
        "the same job: it is requeued.",
    )

    @property
    def left_to_slurm(self) -> bool:
        """Whether Slurm may requeue the job by itself: after a preemption or a node failure."""
        return bool({"preemption", "node_failure"} & set(self.causes))


class Launch(Section):
    """How long the ranks wait for each other."""

    rendezvous_timeout: Duration = Field(
        timedelta(minutes=5),
        description="How long the ranks wait for each other at the start, and then how long the process group may take "
        "to open.",
    )
    hang_timeout: Duration = Field(
        timedelta(minutes=5),
        description="How long a rank of train may take from one step to the next before the job ends; ten times the "
        "longest wait so far if that is more, and at least half an hour before the first step, which may compile.",
    )


TrackerName = Literal["tensorboard", "wandb", "mlflow"]


def _each_once(names: tuple[TrackerName, ...]) -> tuple[TrackerName, ...]:
    if len(set(names)) < len(names):
        raise refusal("a tracker is named twice", "name each once")
    return names


class Trackers(Section):
    """Trackers that show the records of `metrics.jsonl` during the training: one curve over all attempts of a run."""

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
