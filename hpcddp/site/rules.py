"""Compare what a job requests with the facts that its profile holds about the cluster.

A job that Slurm would refuse, or would keep pending forever, gets an error message instead.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcddp.errors import counted, did_you_mean
from hpcddp.jobfile.cluster import Cluster, ClusterFacts, NodeKind, Partition
from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.merge import DEFAULT
from hpcddp.jobfile.problems import JobFileError, Problem
from hpcddp.jobfile.read import ResolvedJob
from hpcddp.jobfile.units import TimeLimit

Finding = tuple[str, str]
"""The key path of an error, and the message."""


class SiteError(JobFileError):
    """The cluster, according to the profile, cannot run the job."""

    kind = "site"


def check_site(job: ResolvedJob, cluster: Cluster, environment: Mapping[str, str]) -> None:
    """Check a job against the facts in its profile about the cluster.

    Args:
        job: the job; without facts in its profile nothing is checked.
        cluster: where it is submitted; nothing is checked for this machine.
        environment: the submitter's environment, which may select another cluster than that of the profile.

    Raises:
        SiteError: lists everything that the cluster cannot provide.
    """
    facts = job.cluster
    if facts is None or cluster != "slurm" or not is_about(facts, environment):
        return
    broken = list(broken_site_rules(job.spec, facts))
    if not broken:
        return
    lines = [f"{_named(key, job.origins)} {sentence}" for key, sentence in broken]
    hint = (
        f"Profile {job.profile} knows {facts.name} as of {facts.looked_at}; if it has changed: "
        f"hpcddp init {job.profile} --force"
    )
    problems = [Problem(file=job.origins.get(key, DEFAULT), key=key, sentence=sentence) for key, sentence in broken]
    raise SiteError("\n".join(lines), hint=hint, problems=problems)


_CLUSTER_NAME = re.compile(r"^\s*ClusterName\s*=\s*([^\s#]+)", re.IGNORECASE | re.MULTILINE)


def is_about(facts: ClusterFacts, environment: Mapping[str, str]) -> bool:
    """Return whether the facts are about the cluster that ``SLURM_CONF`` selects, which may be a sandbox."""
    try:
        text = Path(environment["SLURM_CONF"]).read_text(encoding="utf-8", errors="replace")
    except (KeyError, OSError):
        return True
    name = _CLUSTER_NAME.search(text)
    return name is None or name[1].casefold() == facts.name.casefold()


def broken_site_rules(spec: JobSpec, facts: ClusterFacts) -> Iterator[Finding]:
    """Yield the requests of a job that Slurm would reject or keep pending forever; unknown facts are not checked."""
    if "clusters" in spec.resources.sbatch:
        return  # The job goes to another cluster than that of the facts.
    yield from _accounts(spec, facts)
    unknown = list(_partition_names(spec, facts))
    yield from unknown
    candidates = _candidates(spec, facts)
    if unknown or not candidates:
        return
    yield from _who_may(spec, facts, candidates)
    yield from _time(spec, facts, candidates)
    yield from _nodes(spec, candidates)
    yield from _shape(spec, facts, candidates)


def _named(key: str, origins: Mapping[str, str]) -> str:
    """Return a key for a message, with the origin of its value if that is not the job file."""
    origin = origins.get(key, "default")
    return key if origin in {"job file", "default"} else f"{key} ({origin})"


def _candidates(spec: JobSpec, facts: ClusterFacts) -> dict[str, Partition]:
    """Return the partitions that the job names, by name, or the default one."""
    named = spec.resources.partition or facts.default_partition or ""
    return {name: facts.partitions[name] for name in named.split(",") if name in facts.partitions}


def _partition_names(spec: JobSpec, facts: ClusterFacts) -> Iterator[Finding]:
    key = "resources.partition"
    given = spec.resources.partition
    usable = facts.open_partitions
    if given is None:
        # A reservation or a job submit plugin may set the partition.
        free = spec.resources.reservation is None and not facts.submit_plugins
        if free and usable and facts.default_partition is None:
            yield key, f"is missing, and cluster {facts.name} has no default partition; write {_one_of(usable)}"
        return
    for name in given.split(","):
        if facts.partitions and name not in facts.partitions:
            instead = did_you_mean(name, facts.partitions, f"write {_one_of(usable)}")
            yield key, f"is {given!r}, and cluster {facts.name} has no partition {name!r}; {instead}"


def _who_may(spec: JobSpec, facts: ClusterFacts, candidates: Mapping[str, Partition]) -> Iterator[Finding]:
    barred = {name: why for name in candidates if (why := facts.barred(name)) is not None}
    if len(barred) == len(candidates):
        name, why = next(iter(barred.items()))
        usable = facts.open_partitions
        instead = f"write {_one_of(usable)}" if usable else "ask your site for access"
        yield "resources.partition", f"is {name!r}, which you may not use ({why}); {instead}"
        return
    account = spec.resources.account or facts.accounts.default
    if account is None or not facts.accounts.required:
        return
    closed = {name: partition for name, partition in candidates.items() if not partition.takes(account)}
    if len(closed) == len(candidates):
        name = next(iter(closed))
        mine = facts.accounts_for(name)
        instead = f"write {_one_of(mine)}" if mine else "choose another partition"
        given = "is" if spec.resources.account else "is not given, so that it is"
        yield "resources.account", f"{given} {account!r}, which may not use partition {name}; {instead}"


def _accounts(spec: JobSpec, facts: ClusterFacts) -> Iterator[Finding]:
    accounts = facts.accounts
    given = spec.resources.account
    if not (accounts.required and accounts.names):
        return
    if given is None and accounts.default is None:
        yield (
            "resources.account",
            f"is missing, and cluster {facts.name} runs no job without one; write {_one_of(accounts.names)}",
        )
    elif given is not None and given not in accounts.names:
        yield "resources.account", f"is {given!r}, which is not one of your accounts; {_meant(given, accounts.names)}"
    qos = spec.resources.qos
    if qos is not None and accounts.qos and qos not in accounts.qos:
        yield "resources.qos", f"is {qos!r}, which none of your accounts has; {_meant(qos, accounts.qos)}"


_LONGER_THAN_ANY = float("inf")


def _time(spec: JobSpec, facts: ClusterFacts, candidates: Mapping[str, Partition]) -> Iterator[Finding]:
    limit = spec.resources.time_limit
    # A QOS may lift its partition's limits (sacctmgr(1), PartitionTimeLimit and PartitionMaxNodes).
    if limit is None or spec.resources.qos is not None:
        return
    asked = _LONGER_THAN_ANY if limit.seconds is None else limit.seconds
    longest = max(candidates, key=lambda name: _longest_s(candidates[name]))
    if asked <= _longest_s(candidates[longest]):
        return
    longer = [name for name in facts.open_partitions if _longest_s(facts.partitions[name]) >= asked]
    other = f", or use partition {' or '.join(longer)}" if longer else ""
    yield (
        "resources.time_limit",
        f"is {limit}, and partition {longest} takes {_longest(candidates[longest])} at most; write that or less{other}",
    )


def _longest(partition: Partition) -> TimeLimit:
    try:
        return TimeLimit.parse(partition.max_time)
    except ValueError:
        return TimeLimit(None)


def _longest_s(partition: Partition) -> float:
    seconds = _longest(partition).seconds
    return _LONGER_THAN_ANY if seconds is None else seconds


def _least_nodes(spec: JobSpec) -> int:
    """Return how many nodes Slurm needs to start the job: of a range the smallest number."""
    return spec.node_counts[0] + spec.resources.spare_nodes


def _too_many_nodes(spec: JobSpec, most: int, fact: str) -> Finding:
    """Return the finding about a job that needs more nodes than ``most``, which ``fact`` says in words."""
    nodes = spec.node_counts[0]
    spare_nodes = spec.resources.spare_nodes
    if nodes > most:
        return "resources.nodes", f"is {nodes}, and {fact}; write {most} or less"
    fact = f"which with resources.nodes makes {nodes + spare_nodes}, and {fact}"
    return "resources.spare_nodes", f"is {spare_nodes}, {fact}; write {most - nodes} or less"


def _nodes(spec: JobSpec, candidates: Mapping[str, Partition]) -> Iterator[Finding]:
    lifted = spec.resources.qos is not None
    most = {
        name: partition.nodes if lifted else _most_nodes(partition)
        for name, partition in candidates.items()
        if partition.kinds
    }
    if not most or len(most) < len(candidates) or _least_nodes(spec) <= max(most.values()):
        return
    name = max(most, key=lambda one: most[one])
    why = "gives one job" if most[name] < candidates[name].nodes else "has"
    yield _too_many_nodes(spec, most[name], f"partition {name} {why} {most[name]}")


def _most_nodes(partition: Partition) -> int:
    if partition.max_nodes is None:
        return partition.nodes
    return min(partition.nodes, partition.max_nodes)


def _shape(spec: JobSpec, facts: ClusterFacts, candidates: Mapping[str, Partition]) -> Iterator[Finding]:
    """Yield requests that no node can meet, or else that not enough nodes meet together."""
    if not all(partition.kinds for partition in candidates.values()):
        return
    wrong_type = list(_gpu_type(spec, facts, candidates))
    yield from wrong_type
    left_aside = {"resources.gpus_per_node"} if wrong_type else set()
    if not facts.memory_is_shared_out:
        # Then Slurm compares only the memory of a whole node.
        left_aside |= {"resources.mem_per_cpu", "resources.mem_per_gpu"}
    needs = [need for need in NEEDS if need.key(spec) not in left_aside]
    lacking = [
        need for need in needs if not any(nodes_that_fit(partition, spec, [need]) for partition in candidates.values())
    ]
    for need in lacking:
        elsewhere = [name for name in facts.open_partitions if nodes_that_fit(facts.partitions[name], spec, needs)]
        yield need.key(spec), need.sentence(spec, candidates, " or ".join(elsewhere))
    if not lacking and not wrong_type:
        yield from _enough_nodes(spec, candidates, needs)


def _gpu_type(spec: JobSpec, facts: ClusterFacts, candidates: Mapping[str, Partition]) -> Iterator[Finding]:
    key = "resources.gpu_type"
    wanted = spec.resources.gpu_type
    if wanted is None or any(wanted in partition.gpu_types for partition in candidates.values()):
        return
    here = tuple(sorted({kind for partition in candidates.values() for kind in partition.gpu_types}))
    with_it = [name for name in facts.open_partitions if wanted in facts.partitions[name].gpu_types]
    where = " or ".join(candidates)
    if with_it:
        yield key, f"is {wanted!r}, which partition {where} does not have; use partition {' or '.join(with_it)}"
    elif here:
        yield key, f"is {wanted!r}, and the GPUs of partition {where} are {', '.join(here)}; {_meant(wanted, here)}"
    elif any(partition.gpus_per_node for partition in candidates.values()):
        yield key, f"is {wanted!r}, and cluster {facts.name} gives the GPUs of {where} no type; leave it out"


def _enough_nodes(spec: JobSpec, candidates: Mapping[str, Partition], needs: Sequence[Need]) -> Iterator[Finding]:
    asked = _least_nodes(spec)
    most = max(nodes_that_fit(partition, spec, needs) for partition in candidates.values())
    if most < asked <= max(_most_nodes(partition) for partition in candidates.values()):
        where = " or ".join(candidates)
        needed = what_a_node_needs(spec)
        if most == 0:
            yield (
                "resources.nodes",
                f"is {asked}, and no node of {where} has all of {needed}; ask for less of one",
            )
        else:
            yield _too_many_nodes(spec, most, f"{most} nodes of {where} have {needed}")


_LISTED = 12


def _one_of(names: Iterable[str]) -> str:
    listed = list(names)
    if len(listed) == 1:
        return listed[0]
    more = ", ..." if len(listed) > _LISTED else ""
    return f"one of {', '.join(listed[:_LISTED])}{more}"


def _meant(name: str, names: tuple[str, ...]) -> str:
    return did_you_mean(name, names, f"write {_one_of(names)}")


_MB_PER_UNIT = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}
_MB_PER_G = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """A resource that each node of a job must have.

    Args:
        key: the field that requests it.
        amount: how much the job requests on a node; 0 for none.
        stock: how much a node has.
        says: the value of the field, and the amount that follows from it.
        unit: an amount in words.
        instead: what to write if a node has at most an amount.
    """

    key: Callable[[JobSpec], str]
    amount: Callable[[JobSpec], float]
    stock: Callable[[NodeKind, JobSpec], float]
    says: Callable[[JobSpec], str]
    unit: Callable[[float, JobSpec], str]
    instead: Callable[[JobSpec, float], str]

    def sentence(self, spec: JobSpec, partitions: Mapping[str, Partition], elsewhere: str) -> str:
        """Return the message for a job that requests more than any node has."""
        most = max(self.stock(kind, spec) for partition in partitions.values() for kind in partition.kinds)
        where = f"partition {' or '.join(partitions)}"
        has = f"the nodes of {where} have none"
        if most:
            has = f"a node of {where} has {self.unit(most, spec)} at most"
        way_out = f"use partition {elsewhere}" if elsewhere else self.instead(spec, most)
        return f"is {self.says(spec)}, and {has}; {way_out}"


def nodes_that_fit(partition: Partition, spec: JobSpec, needs: Iterable[Need]) -> int:
    """Return how many nodes of a partition meet all needs."""
    wanted = [(need, need.amount(spec)) for need in needs]
    return sum(
        kind.nodes for kind in partition.kinds if all(need.stock(kind, spec) >= amount for need, amount in wanted)
    )


def what_a_node_needs(spec: JobSpec) -> str:
    """Return the needs of a job on each node, in words."""
    return ", ".join(need.unit(amount, spec) for need in NEEDS if (amount := need.amount(spec)))


def _cpus(spec: JobSpec) -> int:
    return spec.ranks_per_node * spec.resources.cpus_per_task


def _memory_field(spec: JobSpec) -> str:
    given = (name for name in ("mem", "mem_per_cpu", "mem_per_gpu") if getattr(spec.resources, name) is not None)
    return next(given, "mem")


def _memory_mb(spec: JobSpec) -> float:
    field = _memory_field(spec)
    text = getattr(spec.resources, field)
    # "0" requests all memory of a node.
    if not text or text == "0":
        return 0
    times = {"mem": 1, "mem_per_cpu": _cpus(spec), "mem_per_gpu": spec.resources.gpus_per_node}
    return float(text[:-1]) * _MB_PER_UNIT[text[-1]] * times[field]


def _requested_gpus(spec: JobSpec) -> int:
    # Slurm need not list the GPUs of nodes that come with all of them.
    if spec.resources.gpu_request == "none":
        return 0
    return spec.resources.gpus_per_node


def _gpus_of(kind: NodeKind, spec: JobSpec) -> int:
    wanted = spec.resources.gpu_type
    return kind.gpus if wanted is None else kind.gpu_types.get(wanted, 0)


# From here on a number of G is precise enough.
_LEAST_G = 10 * _MB_PER_G


def _shown_memory(megabytes: float, rounded: Callable[[float], int] = math.floor) -> str:
    whole = megabytes >= _LEAST_G or (megabytes and megabytes % _MB_PER_G == 0)
    return f"{rounded(megabytes / _MB_PER_G)}G" if whole else f"{rounded(megabytes)}M"


def _says_cpus(spec: JobSpec) -> str:
    tasks = spec.ranks_per_node
    each = spec.resources.cpus_per_task
    if tasks == 1:
        return str(each)
    return f"{each}, which is {_cpus(spec)} CPUs for the {tasks} tasks of a node"


def _says_memory(spec: JobSpec) -> str:
    field = _memory_field(spec)
    text = getattr(spec.resources, field)
    if field == "mem":
        return str(text)
    return f"{text}, which is {_shown_memory(_memory_mb(spec), math.ceil)} on a node"


def _fewer_cpus(spec: JobSpec, most: float) -> str:
    each = int(most) // spec.ranks_per_node
    if each:
        return f"write {each} or less"
    return f"use {int(most)} tasks on a node or less, and more nodes"


def _less_memory(spec: JobSpec, most: float) -> str:
    where = "" if _memory_field(spec) == "mem" else " on a node"
    return f"ask for {_shown_memory(most)}{where} or less"


def _fewer_gpus(_: JobSpec, most: float) -> str:
    if most:
        return f"write {int(most)} or less, and more nodes"
    return "leave it out for a CPU job, or write resources.gpu_request none if Slurm does not list the GPUs of nodes"


def _gpu_unit(count: float, spec: JobSpec) -> str:
    kind = f"{spec.resources.gpu_type} " if spec.resources.gpu_type else ""
    return counted(round(count), f"{kind}GPU")


NEEDS = (
    Need(
        key=lambda _: "resources.gpus_per_node",
        amount=_requested_gpus,
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
        unit=lambda count, _: counted(round(count), "CPU"),
        instead=_fewer_cpus,
    ),
    Need(
        key=lambda spec: f"resources.{_memory_field(spec)}",
        amount=_memory_mb,
        stock=lambda kind, _: kind.mem_mb,
        says=_says_memory,
        unit=lambda megabytes, _: _shown_memory(megabytes),
        instead=_less_memory,
    ),
)
