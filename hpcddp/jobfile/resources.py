"""The section `resources` of a job file, and the sbatch flags that it accepts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import PydanticKnownError

from hpcddp.errors import did_you_mean
from hpcddp.jobfile.field_facts import FieldFacts, Option, facts_of
from hpcddp.jobfile.fields import (
    Exclusive,
    GpuType,
    GresCount,
    GresName,
    Line,
    Memory,
    Section,
    TimeLimitField,
    refusal,
)
from hpcddp.jobfile.slurm_flags import SBATCH, SRUN

FLAG_PATTERN = r"[a-z][a-z0-9-]*"


_GRES_COUNT = re.compile("[0-9]+[KMGTPkmgtp]?", re.ASCII)


def fields_of_gres(text: str) -> list[tuple[str, str]]:
    """Return the fields of ``resources``, with their values, that mean what ``--gres=TEXT`` asks for."""
    fields = []
    for resource in text.split(","):
        name, *kind = resource.split(":")
        # A resource without a count is one of it.
        count = kind.pop() if kind and _GRES_COUNT.fullmatch(kind[-1]) else "1"
        if name == "gpu":
            fields += [("gpus_per_node", count), *(("gpu_type", word) for word in kind)]
        else:
            fields.append((f"gres.{':'.join([name, *kind])}", count))
    return fields


# Slurm stores these counts in 16 bits, and reserves the largest values (slurm.h, NO_VAL16).
LARGEST_16_BIT_COUNT = 0xFFFD
# Node counts have 32 bits; what sbatch parses is a C int.
LARGEST_NODE_COUNT = 2**31 - 1


def _flag_value(value: object) -> str | bool:
    if value is True:
        return True
    if value is False or value is None:
        raise refusal("a flag cannot be written as off", "write true for a flag without a value, or leave it out")
    if not isinstance(value, str | int):
        raise refusal("a flag takes one value", 'write a string or an integer, or quote it: "1.5"')
    return _LINE.validate_python(str(value))


_LINE: TypeAdapter[str] = TypeAdapter(Line, config=ConfigDict(defer_build=True))
FlagValue = Annotated[
    str | bool,
    PlainValidator(_flag_value),
    WithJsonSchema({"anyOf": [{"const": True}, {"type": ["string", "integer"]}]}),
]


def _flag_name(name: str, command: str) -> str:
    if refused := refused_because(name, command):
        raise refusal(*refused)
    return name


FlagName = Annotated[str, Field(json_schema_extra={"pattern": f"^{FLAG_PATTERN}$"})]
SbatchFlagName = Annotated[FlagName, AfterValidator(lambda name: _flag_name(name, "sbatch"))]
SrunFlagName = Annotated[FlagName, AfterValidator(lambda name: _flag_name(name, "srun"))]


MAIL_TYPES = (
    "NONE", "BEGIN", "END", "FAIL", "REQUEUE", "ALL", "INVALID_DEPEND", "STAGE_OUT", "TIME_LIMIT", "TIME_LIMIT_90",
    "TIME_LIMIT_80", "TIME_LIMIT_50", "ARRAY_TASKS",
)  # fmt: skip
"""The types of mail (sbatch(1), --mail-type)."""


def _mail_types(text: str) -> str:
    for word in text.upper().split(","):
        if word not in MAIL_TYPES:
            problem = f"Slurm has no type of mail {word!r}" if word else "a type of mail is missing between its commas"
            raise refusal(problem, did_you_mean(word, MAIL_TYPES, f"write one or more of {', '.join(MAIL_TYPES)}"))
    return text.upper()


MailTypes = Annotated[Line, AfterValidator(_mail_types)]


MOST_NODE_COUNTS = 64
"""The most numbers of nodes that a range may have: the plan of each is checked."""


@dataclass(frozen=True, slots=True)
class NodeRange:
    """Numbers of nodes of which Slurm chooses one when the job starts (sbatch(1), --nodes).

    Args:
        least: the smallest number, with which the job may start.
        most: the largest number, which is larger.
    """

    least: int
    most: int

    def __str__(self) -> str:
        return f"{self.least}-{self.most}"


_NODE_RANGE = re.compile("([0-9]{1,10})-([0-9]{1,10})", re.ASCII)


_NODE_NUMBER: TypeAdapter[int] = TypeAdapter(
    Annotated[int, Field(ge=1, le=LARGEST_NODE_COUNT, strict=True)], config=ConfigDict(defer_build=True)
)


def _node_count(value: object) -> int | NodeRange:
    if isinstance(value, NodeRange):
        return value
    match = _NODE_RANGE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        try:
            return _NODE_NUMBER.validate_python(value)
        except ValidationError as error:
            details = error.errors()[0]
            raise PydanticKnownError(details["type"], details.get("ctx")) from None  # type: ignore[arg-type]
    least = int(match[1])
    most = int(match[2])
    if least < 1 or most > LARGEST_NODE_COUNT or least > most:
        raise refusal("a range begins with 1 or more nodes, and ends with more", "write for example 2-8")
    if most - least >= MOST_NODE_COUNTS:
        raise refusal(
            f"a range has at most {MOST_NODE_COUNTS} numbers, because each is checked",
            f"write for example {least}-{least + MOST_NODE_COUNTS - 1}",
        )
    return least if least == most else NodeRange(least, most)


def _plain_node_count(value: int | NodeRange) -> int | str:
    return str(value) if isinstance(value, NodeRange) else value


NodeCount = Annotated[
    int | NodeRange,
    PlainValidator(_node_count),
    PlainSerializer(_plain_node_count),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 1, "maximum": LARGEST_NODE_COUNT},
                {"type": "string", "pattern": f"^{_NODE_RANGE.pattern}$"},
            ],
            "examples": [2, "2-8"],
        }
    ),
]


class Resources(Section):
    """The resources that the job requests from Slurm."""

    nodes: Annotated[
        NodeCount,
        FieldFacts(
            flag="nodes",
            is_computed=True,
            option=Option(help="Number of nodes.", is_listed=True),
            other_names=("num_nodes",),
        ),
    ] = Field(
        1,
        description="Hosts of the allocation: a number, or a range such as `2-8`, with which Slurm starts the job as "
        "soon as two nodes are free, with up to eight.",
        json_schema_extra={"unit": "nodes"},
    )
    min_nodes: Annotated[
        int | None,
        FieldFacts(option=Option(help="Nodes that must be left when a node is lost.")),
    ] = Field(
        None,
        ge=1,
        le=LARGEST_NODE_COUNT,
        description="Nodes that must be left when a node is lost, so that the job goes on with them. Refused for now: "
        "null requeues the job.",
        json_schema_extra={"unit": "nodes"},
    )
    spare_nodes: Annotated[int, FieldFacts(option=Option(help="Nodes that take the places of lost ones."))] = Field(
        0,
        ge=0,
        le=LARGEST_NODE_COUNT,
        description="Nodes that the job gets besides `nodes`, to take the places of lost ones. Refused for now, as "
        "`min_nodes`.",
        json_schema_extra={"unit": "nodes"},
    )
    gpus_per_node: Annotated[
        int,
        FieldFacts(
            option=Option(help="GPUs on each node; one rank for each GPU.", is_listed=True),
            other_names=("gres", "gpu", "gpus", "gpus_per_task"),
        ),
    ] = Field(
        0,
        ge=0,
        le=LARGEST_16_BIT_COUNT,
        description="GPUs on each node, one rank each; 0 is a CPU job (gloo).",
        json_schema_extra={"unit": "GPUs"},
    )
    gpu_type: Annotated[
        GpuType | None, FieldFacts(option=Option(help="Kind of GPU, such as a100."), is_of_a_site=True)
    ] = Field(None, description="Kind of GPU: `a100` becomes `--gres=gpu:a100:N`.")
    gpu_request: Annotated[Literal["gres", "gpus-per-node", "none"], FieldFacts(is_of_a_site=True)] = Field(
        "gres",
        description="How Slurm is asked for the GPUs: `gres` writes `--gres=gpu:N`, `gpus-per-node` writes "
        "`--gpus-per-node=N`, and `none` writes nothing, for partitions whose nodes come with all their GPUs. "
        "`hpcddp init` finds out what the cluster accepts.",
    )
    gres: Annotated[Mapping[GresName, GresCount], FieldFacts(is_of_a_site=True)] = Field(
        default_factory=dict,
        description="Other generic resources of each node, by name: `{nvme: 100G, lscratch: 200}`. `NAME:TYPE` is a "
        "kind of one.",
        json_schema_extra={"additionalProperties": False},
    )
    tasks_per_node: Annotated[
        int | None,
        FieldFacts(
            flag="ntasks-per-node",
            is_computed=True,
            option=Option(help="Ranks on each node of a CPU job.", is_listed=True),
            other_names=("ntasks", "ntasks_per_node"),
        ),
    ] = Field(
        None,
        ge=1,
        le=LARGEST_16_BIT_COUNT,
        description="Ranks on each node. null is `gpus_per_node`; for a CPU job what the launcher in `command` states, "
        "or 1. GPUs need one rank each.",
        json_schema_extra={"unit": "tasks"},
    )
    cpus_per_task: Annotated[int, FieldFacts(flag="cpus-per-task", is_computed=True, option=Option(is_listed=True))] = (
        Field(1, ge=1, le=LARGEST_16_BIT_COUNT, description="CPUs of each rank.", json_schema_extra={"unit": "CPUs"})
    )
    mem: Annotated[
        Memory | None,
        FieldFacts(
            flag="mem",
            option=Option(help="Memory of each node, such as 64G.", is_listed=True),
            is_of_a_site=True,
            other_names=("memory",),
        ),
    ] = Field(
        None,
        description="Memory of each node: a number with K, M, G or T, such as `64G` or `1.5T`; 0 is all of it. null "
        "writes no directive.",
    )
    mem_per_cpu: Annotated[
        Memory | None,
        FieldFacts(
            flag="mem-per-cpu", option=Option(help="Memory for each CPU, in place of --mem."), is_of_a_site=True
        ),
    ] = Field(None, description="Memory for each CPU, in place of `mem`.")
    mem_per_gpu: Annotated[
        Memory | None,
        FieldFacts(
            flag="mem-per-gpu", option=Option(help="Memory for each GPU, in place of --mem."), is_of_a_site=True
        ),
    ] = Field(None, description="Memory for each GPU, in place of `mem`.")
    time_limit: Annotated[
        TimeLimitField | None,
        FieldFacts(
            flag="time",
            option=Option(name="--time", help="Time limit: 2h, 90min, 1:30:00, or minutes.", is_listed=True),
            other_names=("timeout", "walltime"),
        ),
    ] = Field(
        None,
        description="Walltime: minutes (`90`), `90min`, `2h`, `10:00` (minutes:seconds), `1:30:00`, `2-00:00:00` or "
        "`unlimited`. null writes no directive: the partition's default.",
    )
    partition: Annotated[
        Line | None,
        FieldFacts(
            flag="partition",
            option=Option(help="Slurm partition.", is_listed=True),
            is_of_a_site=True,
            other_names=("queue",),
        ),
    ] = Field(None, description="Slurm partition, or several with commas.")
    account: Annotated[Line | None, FieldFacts(flag="account", option=Option(), is_of_a_site=True)] = Field(
        None, description="Account to charge."
    )
    qos: Annotated[Line | None, FieldFacts(flag="qos", option=Option(), is_of_a_site=True)] = Field(
        None, description="Quality of service."
    )
    constraint: Annotated[Line | None, FieldFacts(flag="constraint", option=Option(), is_of_a_site=True)] = Field(
        None, description="Node features that are required."
    )
    reservation: Annotated[Line | None, FieldFacts(flag="reservation", option=Option(), is_of_a_site=True)] = Field(
        None, description="Reservation to run in."
    )
    nodelist: Annotated[Line | None, FieldFacts(flag="nodelist", option=Option(), is_of_a_site=True)] = Field(
        None, description="Nodes that the job must get."
    )
    exclude: Annotated[Line | None, FieldFacts(flag="exclude", option=Option(), is_of_a_site=True)] = Field(
        None, description="Nodes that the job must not get."
    )
    exclusive: Annotated[
        Exclusive,
        FieldFacts(flag="exclusive", option=Option(help="Share the nodes with no other job."), is_of_a_site=True),
    ] = Field(
        default=False,
        description="Whether the job shares its nodes with no other job; `user` and `mcs` share them with the jobs of "
        "the same user or MCS label, `topo` takes the whole topology block.",
    )
    mail_type: Annotated[
        MailTypes | None,
        FieldFacts(flag="mail-type", option=Option(help="When Slurm sends mail: END,FAIL."), is_of_a_site=True),
    ] = Field(None, description="When Slurm sends mail: `END,FAIL`, or other types of `man sbatch`, with commas.")
    mail_user: Annotated[
        Line | None,
        FieldFacts(flag="mail-user", option=Option(help="Who gets the mail.", metavar="ADDRESS"), is_of_a_site=True),
    ] = Field(None, description="Who gets the mail. null is the user who submits.")
    sbatch: Annotated[Mapping[SbatchFlagName, FlagValue], FieldFacts(is_of_a_site=True)] = Field(
        default_factory=dict,
        description="Any other sbatch flag, by its long name; `true` writes the flag without a value.",
        json_schema_extra={"additionalProperties": False},
    )
    srun: Annotated[Mapping[SrunFlagName, FlagValue], FieldFacts(is_of_a_site=True)] = Field(
        default_factory=dict,
        description="Flags of the srun that starts the tasks, as `sbatch` has those of sbatch: "
        "`{cpu-bind: cores, mpi: pmix}`. A run on this machine has no srun.",
        json_schema_extra={"additionalProperties": False},
    )


_FACTS = {name: facts_of(field) for name, field in Resources.model_fields.items()}
_FIELDS_OF_FLAGS = {facts.flag: name for name, facts in _FACTS.items() if facts.flag is not None}
FIELDS_WRITTEN_UNCHANGED: Mapping[str, str] = MappingProxyType(
    {flag: name for flag, name in _FIELDS_OF_FLAGS.items() if not _FACTS[name].is_computed}
)
"""The flags of sbatch whose value is that of a field, with the name of the field, in the order of the fields."""
_FLAGS_OF_SRUN = ("accel-bind", "cpu-bind", "gpu-bind", "mpi")
_LOG = "hpcddp reads the log of the job, and chooses where it is: in the run directory, or beside a script for sbatch"
_GRES = "it has its own fields; write resources.gpus_per_node and gpu_type for GPUs, and resources.gres for others"
_TASKS = "it has its own field; write resources.nodes and resources.tasks_per_node"
_REPLACED_FLAGS = {
    "gpus": "resources.gpus_per_node",
    "gpus-per-node": "resources.gpus_per_node",
    "gpus-per-socket": "resources.gpus_per_node",
    "gpus-per-task": "resources.gpus_per_node",
    "job-name": "name",
    "nodefile": "resources.nodelist",
    "signal": "requeue.signal_lead",
    "tasks-per-node": "resources.tasks_per_node",
    **{flag: f"resources.srun.{flag}" for flag in _FLAGS_OF_SRUN},
} | {flag: f"resources.{name}" for flag, name in _FIELDS_OF_FLAGS.items()}
_WITH_ANOTHER_VALUE = frozenset({"gpus", "gpus-per-socket", "gpus-per-task", "nodefile", "signal"})
_OTHER_REFUSED_FLAGS = {
    "array": "one job file is one job; write a sweep for several: hpcddp submit --sweep KEY=VALUES",
    "chdir": "relative paths mean the directory of submission; remove it and submit from there",
    "cpus-per-gpu": "a GPU has one rank, and the CPUs of a rank have a field; write resources.cpus_per_task",
    "distribution": "torch expects the ranks of a node one after the other, which the script asks for; remove it",
    "error": f"{_LOG}; set run_root",
    "export": "the tasks need the submitter's environment; write environment.env or environment.pass_env",
    "export-file": "the tasks need the submitter's environment; write environment.env or environment.pass_env",
    "gres": _GRES,
    "help": "nothing would run; remove it",
    "no-requeue": "it follows from requeue.causes; write causes: [] there",
    "ntasks": _TASKS,
    "ntasks-per-gpu": _TASKS,
    "open-mode": "a requeue must not truncate the log; remove it",
    "output": f"{_LOG}; set run_root",
    "parsable": "hpcddp reads sbatch's answer itself; remove it",
    "requeue": "it follows from requeue.causes; write them there",
    "test-only": "nothing would run; remove it and use hpcddp submit --dry-run",
    "usage": "nothing would run; remove it",
    "version": "nothing would run; remove it",
    "wait": "submit returns at once; remove it and use hpcddp submit --follow",
    "wrap": "hpcddp writes the script; write the command in the job file, or after --",
}
REFUSED_FLAGS: Mapping[str, str] = MappingProxyType(
    _OTHER_REFUSED_FLAGS | {flag: f"it has its own field; write {field}" for flag, field in _REPLACED_FLAGS.items()}
)
"""Long flags (man sbatch) that ``resources.sbatch`` may not hold, each with the reason and what to write instead."""
REFUSED_FLAGS_OF_SRUN: Mapping[str, str] = MappingProxyType(
    {flag: why for flag, why in REFUSED_FLAGS.items() if flag not in {*_FLAGS_OF_SRUN, "gpus-per-task"}}
    | dict.fromkeys(
        ("async", "jobid", "kill-on-bad-exit", "label", "multi-prog", "no-allocate", "pty", "unbuffered", "wait"),
        "the script says how the tasks start and where they write; remove it",
    )
    | {
        "container-env": "it has its own field; write environment.env",
        "container-image": "it has its own field; write environment.container.image",
        "container-mounts": "it has its own field; write environment.container.mounts",
        "container-workdir": "it has its own field; write environment.container.workdir",
    }
)
"""Long flags (man srun) that ``resources.srun`` may not hold, in the same way."""


def refused_because(name: str, command: str) -> tuple[str, str] | None:
    """Return why ``resources.sbatch`` or ``srun`` may not hold a flag, and what to write instead; None where it may.

    Both accept any unambiguous beginning of a long flag (getopt_long), so that ``arr`` means ``--array``. Therefore the
    beginnings of refused flags are refused too.

    Args:
        name: the flag as the user wrote it, with or without dashes in front.
        command: ``sbatch`` or ``srun``.
    """
    flags, refusals = (SRUN, REFUSED_FLAGS_OF_SRUN) if command == "srun" else (SBATCH, REFUSED_FLAGS)
    bare = name.strip().lstrip("-")
    word = flags.short.get(bare, bare.lower().replace("_", "-").partition("=")[0])
    refused = sorted(flag for flag in refusals if flag.startswith(word)) if word else []
    if refused and (refused[0] == word or flags.long_flags_of(word) != [word]):
        why, _, instead = refusals[refused[0]].partition("; ")
        return (f"--{refused[0]} cannot be set here: {why}", instead)
    if len(bare) == 1 or not re.fullmatch(FLAG_PATTERN, name, re.ASCII):
        likely = word if len(bare) > 1 and re.fullmatch(FLAG_PATTERN, word, re.ASCII) else "comment"
        return (
            f"a flag is the long name that man {command} lists, without dashes in front",
            f"write for example {likely}",
        )
    return None


def field_of_flag(flag: str) -> str:
    """Return the field that takes the value of a flag of sbatch.

    Without a field of its own, that is ``resources.sbatch.FLAG``, or ``resources.srun.FLAG`` where srun takes it. A
    flag whose field has another value is refused in ``resources.sbatch``, and the refusal names the field.
    """
    field = None if flag in _WITH_ANOTHER_VALUE else _REPLACED_FLAGS.get(flag)
    return field or f"resources.sbatch.{flag}"
