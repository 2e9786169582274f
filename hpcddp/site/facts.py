"""Query Slurm for partitions, limits, GPUs, accounts and preemption, and parse the output into facts for a profile."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from hpcddp.jobfile.cluster import Accounts, ClusterFacts, NodeKind, Partition, Preemption
from hpcddp.slurm import commands
from hpcddp.slurm.commands import parse_job
from hpcddp.slurm.controller import read_config, requeue_delay_s

# Variables that change which partitions are shown, and how (sinfo(1), scontrol(1), ENVIRONMENT VARIABLES).
_FORMAT_VARIABLES = ("SINFO_", "SCONTROL_", "SLURM_TIME_FORMAT")

NODE_COLUMNS = ("%R", "%D", "%T", "%c", "%m", "%G", "%f")
"""Partition, nodes, their state, CPUs, MiB of memory, GRES and features (sinfo(1))."""
NODE_FORMAT = "|".join(NODE_COLUMNS)

_NO_ACCOUNTING = "accounting_storage/none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The output of Slurm's commands.

    Args:
        config: ``scontrol show config``.
        partitions: ``scontrol show partition``, one line for each, including hidden ones.
        nodes: ``sinfo`` in ``NODE_FORMAT``.
        associations: ``sacctmgr show assoc`` of the user, ``Account|QOS`` in each line; None without accounting,
            or if slurmdbd does not answer.
        default_account: ``sacctmgr show user``; None likewise.
        accounting_error: why there are no associations although the cluster has accounting.
    """

    config: str
    partitions: str
    nodes: str
    associations: str | None = None
    default_account: str | None = None
    accounting_error: str | None = None


def ask_site(environment: Mapping[str, str], *, user: str) -> Answers:
    """Query the cluster that ``SLURM_CONF`` selects, or else the default one of this machine.

    Raises:
        SlurmUnavailableError: Slurm's commands are not installed, or no controller answers.
        SlurmCommandError: the controller rejected a query.
    """
    clean = {name: value for name, value in environment.items() if not name.startswith(_FORMAT_VARIABLES)}
    answers = Answers(
        config=commands.ask("scontrol", "show", "config", environment=clean),
        partitions=commands.ask("scontrol", "--all", "--oneliner", "show", "partition", environment=clean),
        nodes=commands.ask("sinfo", "--all", "--noheader", "--exact", f"--format={NODE_FORMAT}", environment=clean),
    )
    config = read_config(answers.config)
    if config.get("AccountingStorageType", _NO_ACCOUNTING) == _NO_ACCOUNTING:
        return answers
    return _ask_accounts(answers, clean, user=user, cluster=config.get("ClusterName", ""))


def _ask_accounts(answers: Answers, environment: Mapping[str, str], *, user: str, cluster: str) -> Answers:
    """Add the user's associations; slurmdbd may be down, which is not an error."""
    listing = ("sacctmgr", "--noheader", "--parsable2", "--readonly", "show")
    where = ("assoc", "where", f"user={user}", f"cluster={cluster}", "format=Account,QOS")
    associations = default_account = accounting_error = None
    try:
        associations = commands.ask(*listing, *where, environment=environment)
        default_account = commands.ask(
            *listing, "user", "where", f"name={user}", "format=DefaultAccount", environment=environment
        )
    except commands.SlurmCommandError as error:
        accounting_error = error.message
    return replace(
        answers, associations=associations, default_account=default_account, accounting_error=accounting_error
    )


# Nodes in these states run no jobs until an administrator changes that (sinfo(1), NODE STATE CODES).
_OUT_OF_SERVICE = ("down", "drain", "fail", "error", "unk", "inval", "future", "maint", "no_respond")
_NOT_SET = frozenset({"", "(NULL)", "NONE", "N/A", "UNLIMITED", "INFINITE"})


def read_site(answers: Answers, *, user: str, groups: Collection[str], today: str) -> ClusterFacts:
    """Return the facts about a cluster."""
    config = read_config(answers.config)
    partitions = dict(_partitions(answers, config))
    asked_for = {group for partition in partitions.values() for group in partition.allow_groups or ()}
    return ClusterFacts(
        name=config.get("ClusterName", "cluster"),
        slurm=config.get("SLURM_VERSION", ""),
        looked_at=today,
        user=user,
        # Groups that no partition requires are irrelevant, and may be many.
        groups=tuple(sorted(asked_for.intersection(groups))),
        enforce_part_limits=config.get("EnforcePartLimits", "NO").upper(),
        memory_is_shared_out="MEMORY" in config.get("SelectTypeParameters", "").upper(),
        disable_root_jobs=config.get("DisableRootJobs", "").upper() == "YES",
        max_array_size=_number(config.get("MaxArraySize")),
        submit_plugins=_names(config.get("JobSubmitPlugins")),
        accounts=_accounts(answers, config),
        preemption=_preemption(config),
        partitions=partitions,
    )


def _partitions(answers: Answers, config: Mapping[str, str]) -> Iterable[tuple[str, Partition]]:
    kinds = read_nodes(answers.nodes)
    for line in answers.partitions.splitlines():
        fields = parse_job(line)
        name = fields.get("PartitionName")
        if name:
            yield name, _partition(fields, config, kinds.get(name, ()))


def _partition(fields: Mapping[str, str], config: Mapping[str, str], kinds: tuple[NodeKind, ...]) -> Partition:
    return Partition(
        state=fields.get("State", "UP"),
        default=fields.get("Default") == "YES",
        hidden=fields.get("Hidden") == "YES",
        max_time=_time(fields.get("MaxTime")) or "UNLIMITED",
        default_time=_time(fields.get("DefaultTime")),
        max_nodes=_number(fields.get("MaxNodes")),
        allow_accounts=_only(fields.get("AllowAccounts")),
        deny_accounts=_names(fields.get("DenyAccounts")),
        allow_groups=_only(fields.get("AllowGroups")),
        allow_qos=_only(fields.get("AllowQos")),
        preempt_mode=fields.get("PreemptMode") or config.get("PreemptMode", "OFF"),
        grace_time_s=_number(fields.get("GraceTime")) or 0,
        priority_tier=_number(fields.get("PriorityTier")) or 1,
        default_mem=_default_memory(fields) or _default_memory(config),
        # Slurm 26.05 has the field Exclusive for it.
        whole_nodes=fields.get("Exclusive", fields.get("OverSubscribe")) in {"EXCLUSIVE", "NODE", "TOPO"}
        or config.get("SelectType") == "select/linear",
        kinds=kinds,
    )


def read_nodes(text: str) -> dict[str, tuple[NodeKind, ...]]:
    """Return the kinds of nodes of each partition, in the order of ``sinfo``.

    Args:
        text: the output of ``sinfo`` in ``NODE_FORMAT``; nodes that differ only in their state are on separate lines.
    """
    counts: dict[str, dict[tuple[str, ...], tuple[int, int]]] = {}
    for line in text.splitlines():
        words = line.split("|", len(NODE_COLUMNS) - 1)
        # A wrapper of the site may print other lines too.
        if len(words) != len(NODE_COLUMNS):
            continue
        name, count, state, *kind = words
        nodes = _number(count) or 0
        kinds_of_partition = counts.setdefault(name, {})
        nodes_before, available = kinds_of_partition.get(tuple(kind), (0, 0))
        kinds_of_partition[tuple(kind)] = nodes_before + nodes, available + (nodes if _in_service(state) else 0)
    return {
        name: tuple(_kind(key, *counts_of_kind) for key, counts_of_kind in kinds.items() if counts_of_kind[0])
        for name, kinds in counts.items()
    }


def _kind(columns: tuple[str, ...], nodes: int, available: int) -> NodeKind:
    cpus, memory, gres, features = columns
    types = read_gpus(gres)
    return NodeKind(
        nodes=nodes,
        available=available,
        cpus=_number(cpus) or 0,
        mem_mb=_number(memory) or 0,
        gpus=sum(types.values()),
        gpu_types={name: count for name, count in types.items() if name},
        features=_names(features),
    )


def read_gpus(gres: str) -> dict[str, int]:
    """Return the number of GPUs of each type of a node; the type is empty where the site names none.

    Args:
        gres: the node's GRES, such as ``gpu:a100:4(S:0-1),shard:8``.
    """
    gpus: dict[str, int] = {}
    for entry in re.sub(r"\([^)]*\)", "", gres).split(","):
        name, *rest = entry.strip().split(":")
        if name != "gpu":
            continue
        count = int(rest.pop()) if rest and rest[-1].isdecimal() else 1
        words = [word for word in rest if word != "no_consume"]
        kind = words[0] if words else ""
        gpus[kind] = gpus.get(kind, 0) + count
    return gpus


def _in_service(state: str) -> bool:
    word = state.lower()
    return not (word.startswith(_OUT_OF_SERVICE) or word.endswith("*"))


def _accounts(answers: Answers, config: Mapping[str, str]) -> Accounts:
    enforced = _names(config.get("AccountingStorageEnforce"))
    names: set[str] = set()
    qos: set[str] = set()
    for line in (answers.associations or "").splitlines():
        account, _, kinds = line.partition("|")
        names.add(account.strip())
        qos.update(_names(kinds))
    default = (answers.default_account or "").strip().partition("\n")[0].strip()
    return Accounts(
        # limits, qos and safe imply associations (slurm.conf(5), AccountingStorageEnforce).
        required=bool({"associations", "limits", "qos", "safe", "all"}.intersection(enforced)),
        default=default or None,
        names=tuple(sorted(names - {""})),
        qos=tuple(sorted(qos)),
    )


def _preemption(config: Mapping[str, str]) -> Preemption:
    # The parameter has another place and prefix in other versions of Slurm.
    parameters = config.get("SlurmctldParameters", "") + config.get("PreemptParameters", "")
    return Preemption(
        type=config.get("PreemptType", "preempt/none").removeprefix("preempt/"),
        mode=config.get("PreemptMode", "OFF"),
        kill_wait_s=_number(config.get("KillWait")) or 0,
        sends_user_signal="send_user_signal" in parameters,
        requeue=config.get("JobRequeue", "1") != "0",
        requeue_delay_s=requeue_delay_s(config),
    )


def _default_memory(fields: Mapping[str, str]) -> str | None:
    """Return the default memory of jobs, in words."""
    per_gpu = re.search(r"DefMemPerGPU=([0-9]+)", fields.get("JobDefaults", ""))
    defaults = {"CPU": fields.get("DefMemPerCPU"), "node": fields.get("DefMemPerNode"), "GPU": per_gpu and per_gpu[1]}
    words = [f"{mem}M per {what}" for what, mem in defaults.items() if mem and mem.isdecimal() and int(mem)]
    return ", ".join(words) or None


def _time(text: str | None) -> str | None:
    return None if text is None or text.upper() in _NOT_SET else text


def _number(text: str | None) -> int | None:
    match = re.match(r"[0-9]+", text or "")
    return int(match[0]) if match else None


def _only(text: str | None) -> tuple[str, ...] | None:
    return None if text is None or text.upper() in {"ALL", "(NULL)", ""} else _names(text)


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(word for part in (text or "").split(",") if (word := part.strip()).upper() not in _NOT_SET)
