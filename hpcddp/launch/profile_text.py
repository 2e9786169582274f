"""The text of a new profile: what it gives every job, and below it what was found."""

from __future__ import annotations

from collections.abc import Iterator

from hpcddp.launch.facts_text import facts_lines
from hpcddp.launch.site_choice import Choice, usable
from hpcddp.spec.cluster import ClusterFacts, Partition
from hpcddp.spec.tomltext import comment, entry, header


def profile_text(name: str, facts: ClusterFacts, choice: Choice) -> str:
    """Return a profile as TOML.

    Args:
        name: the profile's name.
        facts: what was found.
        choice: what it gives every job.
    """
    lines = [
        comment(f"Profile {name} of hpcddp for cluster {facts.name} (Slurm {facts.slurm}),"),
        comment(f"as {facts.user} saw it on {facts.looked_at}. It is yours to change."),
        comment("Down to [cluster] it holds what a job takes where its job file and hpcddp.toml give nothing:"),
        comment("run_root and the fields of resources, environment, checkpoint, requeue and launch."),
        "",
        header("resources"),
        *_resources(facts, choice),
        "",
        header("requeue"),
        *_requeue(facts, choice),
        "",
        *facts_lines(name, facts),
    ]
    return "".join(f"{line}\n" for line in lines)


def describe_partition(partition: Partition) -> str:
    """Return what a partition has to offer, in one line."""
    kinds = partition.kinds
    if not kinds:
        return "no nodes"
    cpus, memory = max(kind.cpus for kind in kinds), max(kind.mem_mb for kind in kinds)
    words = [f"{partition.nodes} node{'' if partition.nodes == 1 else 's'} of up to {cpus} CPUs, {memory // 1024}G"]
    if len(kinds) == 1:
        words = [words[0].replace("up to ", "")]
    if partition.gpus_per_node:
        types = f" ({', '.join(partition.gpu_types)})" if partition.gpu_types else ""
        words.append(f"{partition.gpus_per_node} GPU{'' if partition.gpus_per_node == 1 else 's'}{types}")
    words.append("no time limit" if partition.max_time == "UNLIMITED" else f"{partition.max_time} at most")
    return ", ".join(words)


def _resources(facts: ClusterFacts, choice: Choice) -> Iterator[str]:
    if choice.partition is not None:
        yield entry("partition", *choice.partition)
    for name in usable(facts):
        if choice.partition is None or name != choice.partition[0]:
            partition = facts.partitions[name]
            role = "the default one: " if partition.default else ""
            yield entry("partition", name, f"{role}{describe_partition(partition)}", active=False)
    yield from _account(facts, choice)
    if choice.time_limit is not None:
        yield entry("time_limit", *choice.time_limit)
    elif choice.runs_in is not None:
        yield entry("time_limit", "1:00:00", _without_limit(facts.partitions[choice.runs_in]), active=False)
    if facts.memory_is_shared_out and choice.runs_in is not None:
        default = facts.partitions[choice.runs_in].default_mem
        without = f"without it a job gets {default}" if default else "without it a job gets all memory of its nodes"
        yield entry("mem", "32G", without, active=False)


def _account(facts: ClusterFacts, choice: Choice) -> Iterator[str]:
    accounts = facts.accounts
    if choice.account is not None:
        yield entry("account", *choice.account)
    elif accounts.required and not accounts.names:
        yield entry("account", "...", "the site runs no job without one, and names none of yours", active=False)
    for name in accounts.names:
        if choice.account is None or name != choice.account[0]:
            role = "what Slurm takes if you say nothing" if name == accounts.default else "another account of yours"
            yield entry("account", name, role, active=False)
    if choice.qos is not None:
        yield entry("qos", *choice.qos)


def _without_limit(partition: Partition) -> str:
    if partition.default_time is not None:
        return f"without it a job gets {partition.default_time}, at most {partition.max_time}"
    if partition.max_time == "UNLIMITED":
        return "without it a job runs for ever; a short one starts sooner, and is requeued at its end"
    return f"without it a job gets {partition.max_time}, the most"


def _requeue(facts: ClusterFacts, choice: Choice) -> Iterator[str]:
    """Yield what the site's policy means for ``requeue``; its defaults fit all of them."""
    preemption = facts.preemption
    if choice.runs_in is not None:
        yield comment(_preempted(choice.runs_in, facts.partitions[choice.runs_in], facts))
    if preemption.requeue:
        yield comment("A job that stops before it is done is requeued (JobRequeue=1).")
    else:
        yield comment("JobRequeue=0: only jobs that ask for it are requeued, and those of hpcddp do.")
    yield entry(
        "allow_continuation",
        value=True,
        comment="where a requeue is refused all the same: a new job goes on with the run",
        active=False,
    )


def _preempted(name: str, partition: Partition, facts: ClusterFacts) -> str:
    preemption, mode = facts.preemption, partition.preempt_mode.upper()
    if preemption.type == "qos" and preemption.mode != "OFF":
        return f"Jobs of another QOS may preempt a job ({preemption.mode}); its own QOS says how long it has to save."
    if preemption.type == "none" or "OFF" in mode:
        return f"Nobody preempts the jobs of {name}."
    grace, kill = partition.grace_time_s, preemption.kill_wait_s
    time = f"{grace} s of grace and {kill} s (KillWait)" if grace else f"{kill} s (KillWait)"
    if "SUSPEND" in mode:
        return f"A preempted job of {name} is suspended, and goes on later by itself."
    end = "cancelled, unless it has been requeued before, which hpcddp does" if "CANCEL" in mode else "requeued"
    return f"A preempted job of {name} has {time} to save; then it is {end}."
