"""The job file as one frozen value, the properties that follow from its fields, and the look-up of its key paths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, Union, get_args, get_origin

from pydantic import Field
from pydantic.fields import FieldInfo

from hpcddp.errors import UserError
from hpcddp.jobfile.environment import Environment
from hpcddp.jobfile.field_facts import FieldFacts, OnResume, Option, facts_of
from hpcddp.jobfile.fields import FunctionReference, Line, Name, ProfileName, Section, SweepField, Text
from hpcddp.jobfile.launchers import OWN, LauncherCommand, LauncherName, is_deepspeed, launcher_command_of, own_launcher
from hpcddp.jobfile.resources import NodeRange, Resources
from hpcddp.jobfile.sections import (
    Batch,
    Checkpoint,
    Launch,
    LearningRate,
    Requeue,
    Trackers,
    Train,
)

if TYPE_CHECKING:
    # It loads a reader of YAML, which the options of the command line do without.
    from hpcddp.jobfile.document import Path


class JobSpec(Section):
    """A job file; the names of the fields are the keys of the file."""

    name: Annotated[
        Name,
        FieldFacts(
            flag="job-name",
            is_computed=True,
            on_resume="always",
            option=Option(help="Name of the job.", metavar="NAME"),
            example="my-job",
            other_names=("job_name",),
        ),
    ] = Field(description="Name of the job and of its directory under `run_root`.")
    run_root: Annotated[
        Line,
        FieldFacts(
            option=Option(help="Directory of all runs; overrides run_root.", metavar="DIR"),
            on_resume="always",
            is_expanded=True,
            other_names=("output", "output_dir"),
        ),
    ] = Field(
        "runs",
        description="Directory of all runs, seen by every node. A relative one is below the directory of submission. "
        "`$NAME` and `~` are expanded when the job is submitted.",
    )
    profile: Annotated[ProfileName | None, FieldFacts(on_resume="always")] = Field(
        None, description="Name of a cluster profile. null is `default`, if there is one."
    )
    resources: Annotated[Resources, FieldFacts(on_resume="always")] = Field(
        default_factory=Resources, description="The resources that the job requests from Slurm."
    )
    environment: Annotated[Environment, FieldFacts(on_resume="always")] = Field(
        default_factory=Environment, description="The environment of the tasks."
    )
    batch: Batch = Field(default_factory=Batch, description="The global batch and its split.")
    learning_rate: Annotated[LearningRate, FieldFacts(on_resume="by name")] = Field(
        default_factory=LearningRate, description="The learning rate."
    )
    train: Train | None = Field(None, description="The built-in training.")
    entrypoint: FunctionReference | None = Field(
        None, description="Your own function in place of `train`: every rank calls it with an `hpcddp.Context`."
    )
    command: Annotated[tuple[Text, ...] | None, Field(strict=False), FieldFacts(on_resume="by name")] = Field(
        None,
        description="Your own program in place of `train`, word by word: every task runs it. `{run_dir}`, `{run_id}` "
        "and `{attempt}` in a word are filled in.",
    )
    launcher: LauncherName | None = Field(
        None,
        description="The launcher that `command` begins with: one task on each node starts it, and it starts the ranks "
        "of the node. null is the one that the command shows if the job has more than one rank, else none. `own` is a "
        "program that starts the ranks of its node by itself.",
    )
    checkpoint: Annotated[Checkpoint, FieldFacts(on_resume="always")] = Field(
        default_factory=Checkpoint, description="When a checkpoint is written."
    )
    requeue: Annotated[Requeue, FieldFacts(on_resume="always")] = Field(
        default_factory=Requeue, description="When the job is requeued."
    )
    launch: Annotated[Launch, FieldFacts(on_resume="always")] = Field(
        default_factory=Launch, description="How long ranks wait for each other."
    )
    trackers: Trackers = Field(default_factory=Trackers, description="Trackers that show the metrics.")
    sweep: SweepField = Field(
        None,
        description=(
            "Values of fields, `{train.seed: 0..4, learning_rate.base: [0.1, 0.2]}`: one run for each combination, all "
            "in one job array. Or a list of mappings, one run each. `{lr: [0.1, 0.2]}` replaces `{lr}` in `command`."
        ),
    )
    max_parallel: int | None = Field(
        None, ge=1, description="Elements of the sweep that run at the same time. null is all; on this machine, one."
    )

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
    def nodes(self) -> int:
        """Nodes of the job; of a range the largest number. An attempt runs the job with the number that it got."""
        nodes = self.resources.nodes
        return nodes.most if isinstance(nodes, NodeRange) else nodes

    @property
    def node_counts(self) -> range:
        """The numbers of nodes that the job may get, in ascending order."""
        nodes = self.resources.nodes
        if isinstance(nodes, NodeRange):
            return range(nodes.least, nodes.most + 1)
        return range(nodes, nodes + 1)

    def sized(self, nodes: int) -> Self:
        """Return the job with one number of nodes in place of its range; a job with a number is returned as it is."""
        if not isinstance(self.resources.nodes, NodeRange):
            return self
        return self.model_copy(update={"resources": self.resources.model_copy(update={"nodes": nodes})})

    @property
    def states_learning_rate(self) -> bool:
        """Whether the job has a learning rate: a training always has one, other jobs only one that is written."""
        return self.train is not None or "base" in self.learning_rate.model_fields_set

    def values(self) -> dict[str, Any]:
        """Return the values of all fields; ``learning_rate.base`` only where the job states a learning rate."""
        values = self.model_dump(mode="json")
        if not self.states_learning_rate:
            del values["learning_rate"]["base"]
        return values

    @property
    def launcher_command(self) -> LauncherCommand | None:
        """The launcher that starts the ranks of each node; None if every task is a rank."""
        launch = self._launcher_in_command
        return launch if self.launcher is not None or self.world_size > 1 else None

    @property
    def _launcher_in_command(self) -> LauncherCommand | None:
        if self.command and (self.launcher == OWN or (self.launcher is None and is_deepspeed(self.command))):
            return own_launcher(self.command)
        launch = None if self.command is None else launcher_command_of(self.command)
        if launch is None or launch.meeting_option is not None:
            return None
        # Launchers for another number of nodes may meet by environment variables, one in each task.
        apart = launch.nodes is not None and launch.nodes not in {1, self.nodes}
        return None if apart and self.launcher is None else launch

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each node: as given, else one for each GPU, else as the command's launcher states, else one."""
        if self.launcher == OWN and self.uses_gpus:
            # tasks_per_node may count the one task.
            return self.resources.gpus_per_node
        given = self.resources.tasks_per_node or self.resources.gpus_per_node
        launch = None if given else self._launcher_in_command
        return given or (launch and launch.ranks_on_each(self.nodes)) or 1

    @property
    def world_size(self) -> int:
        """Ranks in the job."""
        return self.nodes * self.ranks_per_node

    @property
    def tasks_per_node(self) -> int:
        """Slurm tasks on each node: the ranks, or one that starts the launcher."""
        return self.ranks_per_node if self.launcher_command is None else 1

    @property
    def tasks(self) -> int:
        """Slurm tasks in the job."""
        return self.nodes * self.tasks_per_node

    @property
    def cpus_per_task(self) -> int:
        """CPUs of each Slurm task: those of its ranks."""
        return self.resources.cpus_per_task * (self.ranks_per_node // self.tasks_per_node)

    @property
    def uses_gpus(self) -> bool:
        """Whether the job asks for GPUs."""
        return self.resources.gpus_per_node > 0

    @property
    def signal_lead(self) -> timedelta | None:
        """Time before the limit at which Slurm signals the job: the default is at most half of the limit."""
        lead = self.requeue.signal_lead
        limit = self.resources.time_limit
        if lead is None or limit is None or limit.seconds is None or lead.total_seconds() < limit.seconds:
            return lead
        return timedelta(seconds=limit.seconds // 2) or None

    @property
    def device(self) -> Literal["cuda", "cpu"]:
        """Device of the ranks: ``train.device``, else ``cuda`` if the job requests GPUs."""
        if self.train is not None and self.train.device is not None:
            return self.train.device
        return "cuda" if self.uses_gpus else "cpu"

    @property
    def may_lose_nodes(self) -> bool:
        """Whether the job keeps running when it loses a node."""
        return self.resources.min_nodes is not None or self.resources.spare_nodes > 0


_UNIONS = (Union, UnionType)


class ValueKind(Enum):
    """The kinds of values that a key path can refer to."""

    SECTION = "section"
    """A mapping with fields of its own."""
    MAPPING = "mapping"
    """A mapping whose keys the user names."""
    LIST = "list"
    VALUE = "value"
    ENTRY = "entry"
    """A value inside a mapping whose keys the user names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyType:
    """What the job file may have under a key path.

    Args:
        nullable: whether the value may be null.
        section: the type of the section, for a section.
        types: the types of its values except null; empty for an entry of a mapping.
    """

    kind: ValueKind
    nullable: bool
    section: type[Section] | None = None
    types: AbstractSet[object] = frozenset()


def find_key(path: Path) -> KeyType | None:
    """Return the type of a key path, or None if the job file has no such key."""
    if not path:
        return KeyType(kind=ValueKind.SECTION, nullable=False, section=JobSpec)
    fields = list(_fields_on(path))
    if not fields:
        return None
    key_type = key_type_of(fields[-1])
    if len(fields) == len(path):
        return key_type
    if key_type.kind is ValueKind.MAPPING:
        return KeyType(kind=ValueKind.ENTRY, nullable=False)
    return None


def _fields_on(path: Path) -> Iterator[FieldInfo]:
    """Yield the fields on a key path, sections first, up to the first key that is not that of a field."""
    section: type[Section] | None = JobSpec
    for key in path:
        field = None if section is None else section.model_fields.get(key)
        if field is None:
            return
        yield field
        section = key_type_of(field).section


@cache
def secret_paths() -> frozenset[Path]:
    """Return the key paths whose values may be or contain secrets."""
    return frozenset(path for path, field in field_paths() if facts_of(field).may_be_secret)


def is_secret(path: Path) -> bool:
    """Return whether the value of a key path must not be shown, because it may be a secret, or contain or be in one."""
    return any(path[: len(secret)] == secret[: len(path)] for secret in secret_paths())


def example_of(path: Path) -> str | None:
    """Return the example for a required field; None for any other key path."""
    fields = list(_fields_on(path))
    return facts_of(fields[-1]).example if len(fields) == len(path) > 0 else None


def on_resume(path: Path) -> OnResume:
    """Return whether a run may go on with another value of a key: as its field says, else as the section above it."""
    answer: OnResume = "never"
    for field in _fields_on(path):
        answer = facts_of(field).on_resume or answer
    return answer


def key_type_of(field: FieldInfo) -> KeyType:
    """Return the type of the key that a field is for."""
    choices = tuple(_alternatives(field.annotation))
    nullable = NoneType in choices
    for choice in choices:
        if isinstance(choice, type) and issubclass(choice, Section):
            return KeyType(kind=ValueKind.SECTION, nullable=nullable, section=choice)
    types = {get_origin(choice) or choice for choice in choices} - {NoneType}
    kind = ValueKind.MAPPING if Mapping in types else ValueKind.LIST if tuple in types else ValueKind.VALUE
    return KeyType(kind=kind, nullable=nullable, types=types)


def field_paths(section: type[Section] = JobSpec, above: Path = ()) -> Iterator[tuple[Path, FieldInfo]]:
    """Yield every field of a section and of the sections in it, a section before its fields."""
    for name, field in section.model_fields.items():
        path = (*above, name)
        yield path, field
        below = key_type_of(field).section
        if below is not None:
            yield from field_paths(below, path)


def leaf_paths(spec: Section, above: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the path and the value of every field that is not a section."""
    for name in type(spec).model_fields:
        value = getattr(spec, name)
        if isinstance(value, Section):
            yield from leaf_paths(value, (*above, name))
        else:
            yield (*above, name), value


def _alternatives(annotation: object) -> Iterator[object]:
    """Yield the members of a union, without ``Annotated``."""
    if get_origin(annotation) is Annotated:
        yield from _alternatives(get_args(annotation)[0])
    elif get_origin(annotation) in _UNIONS:
        for choice in get_args(annotation):
            yield from _alternatives(choice)
    else:
        yield annotation
