"""What each node of a job must have, and which nodes of a partition have it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from hpcddp.spec.cluster import NodeKind, Partition
from hpcddp.spec.job import JobSpec

_MB_PER_UNIT = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}
_MB_PER_G = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """One thing that each node of a job must have.

    Args:
        key: the field that asks for it.
        amount: how much of it the job wants on a node; 0 for nothing.
        stock: how much of it a node has.
        says: what the field says, and what that comes to.
        unit: an amount in words.
        instead: what to write where a node has no more than an amount.
    """

    key: Callable[[JobSpec], str]
    amount: Callable[[JobSpec], float]
    stock: Callable[[NodeKind, JobSpec], float]
    says: Callable[[JobSpec], str]
    unit: Callable[[float, JobSpec], str]
    instead: Callable[[JobSpec, float], str]

    def sentence(self, spec: JobSpec, partitions: Mapping[str, Partition], elsewhere: str) -> str:
        """Return the sentence about a job that wants more of it than any node has.

        Args:
            spec: the job.
            partitions: where it may go, by name.
            elsewhere: a partition that has it; empty for none.
        """
        most = max(self.stock(kind, spec) for one in partitions.values() for kind in one.kinds)
        where = f"partition {' or '.join(partitions)}"
        has = f"a node of {where} has {self.unit(most, spec)} at most" if most else f"the nodes of {where} have none"
        way_out = f"use partition {elsewhere}" if elsewhere else self.instead(spec, most)
        return f"is {self.says(spec)}, and {has}; {way_out}"


def nodes_that_fit(partition: Partition, spec: JobSpec, needs: Iterable[Need]) -> int:
    """Return how many nodes of a partition have everything that is needed."""
    wanted = [(need, need.amount(spec)) for need in needs]
    return sum(
        kind.nodes for kind in partition.kinds if all(need.stock(kind, spec) >= amount for need, amount in wanted)
    )


def what_a_node_needs(spec: JobSpec) -> str:
    """Return what each node of a job must have, in words."""
    return ", ".join(need.unit(amount, spec) for need in NEEDS if (amount := need.amount(spec)))


def _cpus(spec: JobSpec) -> int:
    return spec.tasks_per_node * spec.resources.cpus_per_task


def _memory_field(spec: JobSpec) -> str:
    given = (name for name in ("mem", "mem_per_cpu", "mem_per_gpu") if getattr(spec.resources, name) is not None)
    return next(given, "mem")


def _memory_mb(spec: JobSpec) -> float:
    text = getattr(spec.resources, _memory_field(spec))
    times = {"mem": 1, "mem_per_cpu": _cpus(spec), "mem_per_gpu": spec.resources.gpus_per_node}
    # 0 is all the memory that a node has.
    return float(text[:-1]) * _MB_PER_UNIT[text[-1]] * times[_memory_field(spec)] if text and text != "0" else 0


def _gpus_of(kind: NodeKind, spec: JobSpec) -> int:
    wanted = spec.resources.gpu_type
    return kind.gpus if wanted is None else kind.gpu_types.get(wanted, 0)


def _shown_memory(megabytes: float) -> str:
    whole = megabytes >= _MB_PER_G
    return f"{megabytes / _MB_PER_G:.0f}G" if whole else f"{megabytes:.0f}M"


def _says_cpus(spec: JobSpec) -> str:
    tasks, each = spec.tasks_per_node, spec.resources.cpus_per_task
    return str(each) if tasks == 1 else f"{each}, which is {_cpus(spec)} CPUs for the {tasks} tasks of a node"


def _says_memory(spec: JobSpec) -> str:
    field = _memory_field(spec)
    text = getattr(spec.resources, field)
    return str(text) if field == "mem" else f"{text}, which is {_shown_memory(_memory_mb(spec))} on a node"


def _fewer_cpus(spec: JobSpec, most: float) -> str:
    each = int(most) // spec.tasks_per_node
    return f"write {each} or less" if each else f"use {int(most)} tasks on a node or less, and more nodes"


def _fewer_gpus(spec: JobSpec, most: float) -> str:  # noqa: ARG001  the form of all of them
    return f"write {int(most)} or less, and more nodes" if most else "leave it out for a CPU job"


def _gpu_unit(count: float, spec: JobSpec) -> str:
    kind = f"{spec.resources.gpu_type} " if spec.resources.gpu_type else ""
    return f"{count:.0f} {kind}GPU{'' if count == 1 else 's'}"


NEEDS = (
    Need(
        key=lambda _: "resources.gpus_per_node",
        amount=lambda spec: spec.resources.gpus_per_node,
        stock=_gpus_of,
        says=lambda spec: str(spec.resources.gpus_per_node),
        unit=_gpu_unit,
        instead=_fewer_gpus,
    ),
    Need(
        key=lambda _: "resources.cpus_per_task",
        amount=_cpus,
        stock=lambda kind, _: kind.cpus,
        says=_says_cpus,
        unit=lambda count, _: f"{count:.0f} CPU{'' if count == 1 else 's'}",
        instead=_fewer_cpus,
    ),
    Need(
        key=lambda spec: f"resources.{_memory_field(spec)}",
        amount=_memory_mb,
        stock=lambda kind, _: kind.mem_mb,
        says=_says_memory,
        unit=lambda megabytes, _: _shown_memory(megabytes),
        instead=lambda _, most: f"ask for {int(most)}M on a node or less",
    ),
)
