"""What a job asks for, held against what its profile knows of the cluster: sentences in place of endless waiting."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcddp.errors import UserError
from hpcddp.launch.site_fit import NEEDS, Need, nodes_that_fit, what_a_node_needs
from hpcddp.launch.submission import Cluster
from hpcddp.spec.cluster import ClusterFacts, Partition
from hpcddp.spec.job import JobSpec
from hpcddp.spec.names import nearest
from hpcddp.spec.read import ResolvedJob
from hpcddp.spec.units import TimeLimit

Finding = tuple[str, str]
"""The key path at fault, and the sentence about it."""

_LONGER_THAN_ANY = float("inf")
_LISTED = 12
_CLUSTER_NAME = re.compile(r"^\s*ClusterName\s*=\s*([^\s#]+)", re.IGNORECASE | re.MULTILINE)


class SiteError(UserError):
    """The cluster, as the profile knows it, cannot run the job.

    Attributes:
        findings: the key paths at fault, each with its sentence.
    """

    kind = "site"

    def as_json(self) -> dict[str, Any]:
        """Return the document that ``--json`` prints, with a list of what was found."""
        document = super().as_json()
        found: tuple[Finding, ...] = self.values.get("findings", ())
        document["error"]["problems"] = [{"key": key, "sentence": sentence} for key, sentence in found]
        return document


def check_site(job: ResolvedJob, cluster: Cluster, environment: Mapping[str, str]) -> None:
    """Hold a job against what its profile knows of the cluster.

    Args:
        job: the job; one whose profile knows nothing fits.
        cluster: where it goes; this machine is not held to the facts.
        environment: the submitter's environment, which may name another cluster than the profile does.

    Raises:
        SiteError: with everything that cannot be.
    """
    facts = job.cluster
    if facts is None or cluster != "slurm" or not _is_about(facts, environment):
        return
    found = list(broken_site_rules(job.spec, facts))
    if not found:
        return
    lines = [f"{_named(key, job.origins)} {sentence}" for key, sentence in found]
    hint = (
        f"Profile {job.profile} knows {facts.name} as of {facts.looked_at}; if it has changed: "
        f"hpcddp init {job.profile} --force"
    )
    raise SiteError("\n".join(lines), hint=hint, findings=tuple(found))


def _is_about(facts: ClusterFacts, environment: Mapping[str, str]) -> bool:
    """Return whether the facts are about the cluster that ``SLURM_CONF`` names; it may be a sandbox, say."""
    try:
        text = Path(environment["SLURM_CONF"]).read_text(encoding="utf-8", errors="replace")
    except (KeyError, OSError):
        return True
    name = _CLUSTER_NAME.search(text)
    return name is None or name[1].casefold() == facts.name.casefold()


def broken_site_rules(spec: JobSpec, facts: ClusterFacts) -> Iterator[Finding]:
    """Yield what the cluster cannot give a job, or would make it wait for ever for.

    Args:
        spec: the job.
        facts: what is known of the cluster; what is not known holds nothing up.
    """
    if "clusters" in spec.resources.sbatch:
        return  # The facts are about another cluster than this job's.
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
    """Return a key as a sentence begins with it: with where its value came from, if not from the job file."""
    origin = origins.get(key, "default")
    return key if origin in {"job file", "default"} else f"{key} ({origin})"


def _candidates(spec: JobSpec, facts: ClusterFacts) -> dict[str, Partition]:
    """Return the partitions that the job may go to, by name."""
    named = spec.resources.partition or facts.default_partition or ""
    return {name: facts.partitions[name] for name in named.split(",") if name in facts.partitions}


def _partition_names(spec: JobSpec, facts: ClusterFacts) -> Iterator[Finding]:
    key, given = "resources.partition", spec.resources.partition
    usable = facts.open_partitions
    if given is None:
        # A reservation, and a rule of the site's, may bring a partition along.
        free = spec.resources.reservation is None and not facts.submit_plugins
        if free and usable and facts.default_partition is None:
            yield key, f"is missing, and cluster {facts.name} has no default partition; write {_one_of(usable)}"
        return
    for name in given.split(","):
        if facts.partitions and name not in facts.partitions:
            near = nearest(name, facts.partitions)
            instead = f"did you mean {near}?" if near else f"write {_one_of(usable)}"
            yield key, f"is {given!r}, and cluster {facts.name} has no partition {name!r}; {instead}"


def _who_may(spec: JobSpec, facts: ClusterFacts, candidates: Mapping[str, Partition]) -> Iterator[Finding]:
    barred = {name: why for name in candidates if (why := facts.barred(name)) is not None}
    if len(barred) == len(candidates):
        name, why = next(iter(barred.items()))
        usable = facts.open_partitions
        instead = f"write {_one_of(usable)}" if usable else "ask your site for access"
        yield "resources.partition", f"is {name!r}, which is not for you ({why}); {instead}"
        return
    account = spec.resources.account or facts.accounts.default
    if account is None or not facts.accounts.required:
        return
    closed = {name: one for name, one in candidates.items() if not one.takes(account)}
    if len(closed) == len(candidates):
        name = next(iter(closed))
        mine = facts.accounts_for(name)
        instead = f"write {_one_of(mine)}" if mine else "choose another partition"
        given = "is" if spec.resources.account else "is not given, so that it is"
        yield "resources.account", f"{given} {account!r}, which may not use partition {name}; {instead}"


def _accounts(spec: JobSpec, facts: ClusterFacts) -> Iterator[Finding]:
    accounts, given = facts.accounts, spec.resources.account
    if not (accounts.required and accounts.names):
        return
    if given is None and accounts.default is None:
        yield (
            "resources.account",
            f"is missing, and cluster {facts.name} runs no job without one; write {_one_of(accounts.names)}",
        )
    elif given is not None and given not in accounts.names:
        yield "resources.account", f"is {given!r}, which is no account of yours; {_meant(given, accounts.names)}"
    qos = spec.resources.qos
    if qos is not None and accounts.qos and qos not in accounts.qos:
        yield "resources.qos", f"is {qos!r}, which none of your accounts has; {_meant(qos, accounts.qos)}"


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


def _nodes(spec: JobSpec, candidates: Mapping[str, Partition]) -> Iterator[Finding]:
    asked = spec.resources.nodes
    lifted = spec.resources.qos is not None
    most = {
        name: partition.nodes if lifted else _most_nodes(partition)
        for name, partition in candidates.items()
        if partition.kinds
    }
    if not most or len(most) < len(candidates) or asked <= max(most.values()):
        return
    name = max(most, key=lambda one: most[one])
    why = "gives one job" if most[name] < candidates[name].nodes else "has"
    yield "resources.nodes", f"is {asked}, and partition {name} {why} {most[name]}; write {most[name]} or less"


def _most_nodes(partition: Partition) -> int:
    return partition.nodes if partition.max_nodes is None else min(partition.nodes, partition.max_nodes)


def _gpu_type(spec: JobSpec, facts: ClusterFacts, candidates: Mapping[str, Partition]) -> Iterator[Finding]:
    key, wanted = "resources.gpu_type", spec.resources.gpu_type
    if wanted is None or any(wanted in one.gpu_types for one in candidates.values()):
        return
    here = tuple(sorted({kind for one in candidates.values() for kind in one.gpu_types}))
    with_it = [name for name in facts.open_partitions if wanted in facts.partitions[name].gpu_types]
    where = " or ".join(candidates)
    if with_it:
        yield key, f"is {wanted!r}, which partition {where} does not have; use partition {' or '.join(with_it)}"
    elif here:
        yield key, f"is {wanted!r}, and the GPUs of partition {where} are {', '.join(here)}; {_meant(wanted, here)}"
    elif any(one.gpus_per_node for one in candidates.values()):
        yield key, f"is {wanted!r}, and cluster {facts.name} gives the GPUs of {where} no type; leave it out"


def _shape(spec: JobSpec, facts: ClusterFacts, candidates: Mapping[str, Partition]) -> Iterator[Finding]:
    """Find what no node has, and then whether enough nodes have all of it together."""
    if not all(partition.kinds for partition in candidates.values()):
        return
    wrong_type = list(_gpu_type(spec, facts, candidates))
    yield from wrong_type
    left_aside = {"resources.gpus_per_node"} if wrong_type else set()
    if not facts.memory_is_shared_out:
        # Slurm holds only the memory of a whole node against it then.
        left_aside |= {"resources.mem_per_cpu", "resources.mem_per_gpu"}
    needs = [need for need in NEEDS if need.key(spec) not in left_aside]
    lacking = [need for need in needs if not any(nodes_that_fit(one, spec, [need]) for one in candidates.values())]
    for need in lacking:
        elsewhere = [name for name in facts.open_partitions if nodes_that_fit(facts.partitions[name], spec, needs)]
        yield need.key(spec), need.sentence(spec, candidates, " or ".join(elsewhere))
    if not lacking and not wrong_type:
        yield from _enough_nodes(spec, candidates, needs)


def _enough_nodes(spec: JobSpec, candidates: Mapping[str, Partition], needs: Sequence[Need]) -> Iterator[Finding]:
    asked, most = spec.resources.nodes, max(nodes_that_fit(one, spec, needs) for one in candidates.values())
    if most < asked <= max(_most_nodes(one) for one in candidates.values()):
        where, needed = " or ".join(candidates), what_a_node_needs(spec)
        if most == 0:
            yield "resources.nodes", f"is {asked}, and no node of {where} has all of {needed}; ask for less of one"
        else:
            yield "resources.nodes", f"is {asked}, and {most} nodes of {where} have {needed}; write {most} or less"


def _one_of(names: Iterable[str]) -> str:
    listed = list(names)
    if len(listed) == 1:
        return listed[0]
    more = ", ..." if len(listed) > _LISTED else ""
    return f"one of {', '.join(listed[:_LISTED])}{more}"


def _meant(name: str, known: tuple[str, ...]) -> str:
    near = nearest(name, known)
    return f"did you mean {near}?" if near else f"write {_one_of(known)}"
