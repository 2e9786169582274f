"""What a job asks Slurm for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, Field, PlainValidator, TypeAdapter, WithJsonSchema

from hpcddp.spec.fields import GpuType, Line, Memory, Section, refusal
from hpcddp.spec.sbatch_flags import FLAG_PATTERN, refused_because
from hpcddp.spec.timefields import TimeLimitField

# Slurm keeps these counts in 16 bits, of which the largest values have a meaning of their own (slurm.h, NO_VAL16).
LARGEST_16_BIT_COUNT = 0xFFFD
# Node counts have 32 bits; what sbatch parses is a C int.
LARGEST_NODE_COUNT = 2**31 - 1


def _flag_value(value: object) -> str | bool:
    if value is True:
        return True
    if value is False or value is None:
        raise refusal("a flag cannot be written as off", "write true for a flag without a value, or leave it out")
    if not isinstance(value, str | int):
        raise refusal("a flag takes one value", 'write a text or a whole number, or quote it: "1.5"')
    return _LINE.validate_python(str(value))


_LINE: TypeAdapter[str] = TypeAdapter(Line)
FlagValue = Annotated[
    str | bool,
    PlainValidator(_flag_value),
    WithJsonSchema({"anyOf": [{"const": True}, {"type": ["string", "integer"]}]}),
]


def _flag_name(name: str) -> str:
    refused = refused_because(name)
    if refused is not None:
        raise refusal(*refused)
    return name


FlagName = Annotated[str, AfterValidator(_flag_name), Field(json_schema_extra={"pattern": f"^{FLAG_PATTERN}$"})]


class Resources(Section):
    """What the job asks Slurm for."""

    nodes: int = Field(
        1, ge=1, le=LARGEST_NODE_COUNT, description="Hosts of the allocation.", json_schema_extra={"unit": "nodes"}
    )
    gpus_per_node: int = Field(
        0,
        ge=0,
        le=LARGEST_16_BIT_COUNT,
        description="GPUs on each node, one task each; 0 is a CPU job (gloo).",
        json_schema_extra={"unit": "GPUs"},
    )
    gpu_type: GpuType | None = Field(None, description="Kind of GPU: `a100` becomes `--gres=gpu:a100:N`.")
    tasks_per_node: int | None = Field(
        None,
        ge=1,
        le=LARGEST_16_BIT_COUNT,
        description="Ranks on each node. null is `gpus_per_node`, or 1 for a CPU job; GPUs need one task each.",
        json_schema_extra={"unit": "tasks"},
    )
    cpus_per_task: int = Field(
        1, ge=1, le=LARGEST_16_BIT_COUNT, description="CPUs of each task.", json_schema_extra={"unit": "CPUs"}
    )
    mem: Memory | None = Field(
        None,
        description="Memory of each node: a number with K, M, G or T; 0 is all of it. null writes no directive.",
    )
    mem_per_cpu: Memory | None = Field(None, description="Memory for each CPU, in place of `mem`.")
    mem_per_gpu: Memory | None = Field(None, description="Memory for each GPU, in place of `mem`.")
    time_limit: TimeLimitField | None = Field(
        None,
        description="Walltime: minutes (`90`), `90min`, `2h`, `10:00` (minutes:seconds), `1:30:00`, `2-00:00:00` or "
        "`unlimited`. null writes no directive: the partition's default.",
    )
    partition: Line | None = Field(None, description="Slurm partition, or several with commas.")
    account: Line | None = Field(None, description="Account that pays.")
    qos: Line | None = Field(None, description="Quality of service.")
    constraint: Line | None = Field(None, description="Node features that are required.")
    reservation: Line | None = Field(None, description="Reservation to run in.")
    nodelist: Line | None = Field(None, description="Nodes that the job must get.")
    exclude: Line | None = Field(None, description="Nodes that the job must not get.")
    exclusive: bool = Field(default=False, description="Whether the job shares its nodes with no other job.")
    licenses: Line | None = Field(None, description="Licenses that the job holds while it runs.")
    sbatch: Mapping[FlagName, FlagValue] = Field(
        default_factory=dict,
        description="Any other sbatch flag, by its long name; `true` writes the flag without a value.",
        json_schema_extra={"additionalProperties": False},
    )
