"""The table ``[cluster]`` of a new profile: what was found, with what it means."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hpcddp.spec.cluster import FACTS, ClusterFacts, NodeKind, Partition
from hpcddp.spec.tomltext import comment, entry, header, rows

_PART_LIMITS = {
    "NO": "a job beyond its partition's limits is accepted, and waits for ever",
    "ANY": "a job that fits none of its partitions is refused",
    "ALL": "a job that does not fit each of its partitions is refused",
}


def facts_lines(name: str, facts: ClusterFacts) -> Iterator[str]:
    """Yield the lines of the table.

    Args:
        name: the profile's name.
        facts: what was found.
    """
    yield comment("What was found. No job takes a value from here, but hpcddp submit refuses what cannot run.")
    yield comment(f"When the cluster has changed: hpcddp init {name} --force")
    yield header(FACTS)
    yield entry("name", facts.name)
    yield entry("slurm", facts.slurm)
    yield entry("looked_at", facts.looked_at)
    yield entry("user", facts.user)
    if facts.groups:
        yield entry("groups", facts.groups, "those of yours that a partition asks for")
    limits = facts.enforce_part_limits
    yield entry("enforce_part_limits", limits, _PART_LIMITS.get(limits, ""))
    shared = "memory is given out to jobs like CPUs" if facts.memory_is_shared_out else "no job waits for memory"
    yield entry("memory_is_shared_out", facts.memory_is_shared_out, shared)
    yield entry("disable_root_jobs", facts.disable_root_jobs)
    if facts.max_array_size is not None:
        yield entry("max_array_size", facts.max_array_size, "a job array has fewer elements than that")
    if facts.submit_plugins:
        yield entry("submit_plugins", facts.submit_plugins, "the site's own rules: they may change or refuse any job")
    yield from _accounts(facts)
    yield from _preemption(facts)
    for partition_name, partition in facts.partitions.items():
        yield from _partition(partition_name, partition, facts)


def _accounts(facts: ClusterFacts) -> Iterator[str]:
    accounts = facts.accounts
    yield ""
    yield header(FACTS, "accounts")
    what = "a job needs an account that the site knows" if accounts.required else "no job needs an account"
    yield entry("required", accounts.required, what)
    if accounts.default is not None:
        yield entry("default", accounts.default, "of jobs that name none")
    if accounts.names:
        yield entry("names", accounts.names)
    if accounts.qos:
        yield entry("qos", accounts.qos)


def _preemption(facts: ClusterFacts) -> Iterator[str]:
    preemption = facts.preemption
    who = {
        "none": "no job preempts another",
        "partition_prio": "jobs preempt those of partitions with a lower priority_tier",
        "qos": "jobs preempt those whose QOS says so",
    }
    yield ""
    yield header(FACTS, "preemption")
    yield entry("type", preemption.type, who.get(preemption.type, ""))
    yield entry("mode", preemption.mode, "of partitions that say nothing else")
    yield entry("kill_wait_s", preemption.kill_wait_s, "from SIGTERM to SIGKILL")
    yield entry("sends_user_signal", preemption.sends_user_signal, "whether a preempted job gets USR2, too")
    yield entry("requeue", preemption.requeue, "JobRequeue: whether jobs are requeued that say nothing about it")
    yield entry("requeue_delay_s", preemption.requeue_delay_s, "Slurm's own; requeue.expedite shortens it")


def _partition(name: str, partition: Partition, facts: ClusterFacts) -> Iterator[str]:
    yield ""
    yield header(FACTS, "partitions", name)
    barred = facts.barred(name)
    yield entry("state", partition.state, f"not for you: {barred}" if barred else "")
    for key in ("default", "hidden"):
        if getattr(partition, key):
            yield entry(key, value=True)
    yield entry("max_time", partition.max_time)
    if partition.default_time is not None:
        yield entry("default_time", partition.default_time, "of jobs that name no time limit")
    if partition.max_nodes is not None:
        yield entry("max_nodes", partition.max_nodes, "of one job")
    for key in ("allow_accounts", "deny_accounts", "allow_groups", "allow_qos"):
        if getattr(partition, key):
            yield entry(key, getattr(partition, key))
    yield entry("priority_tier", partition.priority_tier)
    yield entry("preempt_mode", partition.preempt_mode)
    yield entry("grace_time_s", partition.grace_time_s)
    if partition.default_mem is not None:
        yield entry("default_mem", partition.default_mem, "of jobs that ask for none")
    yield from rows("kinds", [_kind(kind) for kind in partition.kinds])


def _kind(kind: NodeKind) -> dict[str, Any]:
    always = {"nodes": kind.nodes, "available": kind.available, "cpus": kind.cpus, "mem_mb": kind.mem_mb}
    some = {"gpus": kind.gpus, "gpu_types": kind.gpu_types, "features": kind.features}
    return {**always, **{key: value for key, value in some.items() if value}}
