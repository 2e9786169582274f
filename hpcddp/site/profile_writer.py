"""Write a new profile and a first job file."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import tomlkit
from tomlkit.items import InlineTable, Item, Key, Table

from hpcddp.errors import UserError, counted, did_you_mean
from hpcddp.jobfile.cluster import FACTS, ClusterFacts, NodeKind, Partition
from hpcddp.jobfile.profiles import DEFAULT_PROFILE
from hpcddp.jobfile.units import HOUR, MINUTE, TimeLimit, UnitError


class UnknownChoiceError(UserError):
    """The cluster does not have the requested partition, account or QOS."""

    kind = "choice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Default settings of a new profile; None leaves the choice to Slurm.

    Args:
        partition: the partition, and the reason for it.
        account: the account, and the reason for it.
        qos: the QOS, and the reason for it.
        time_limit: the time limit, and the reason for it.
        runs_in: the partition of jobs with these settings; None where there is none that the user may use.
    """

    partition: tuple[str, str] | None
    account: tuple[str, str] | None
    qos: tuple[str, str] | None
    time_limit: tuple[str, str] | None
    runs_in: str | None


_ASKED = "as requested"


def choose(facts: ClusterFacts, *, partition: str | None, account: str | None, qos: str | None) -> Choice:
    """Choose the default settings of a new profile; None = the user has made no choice.

    Raises:
        UnknownChoiceError: the cluster does not have a choice of the user.
    """
    chosen_partition = _chosen_partition(facts, partition)
    runs_in = chosen_partition[0] if chosen_partition else facts.default_partition
    chosen_account = _chosen_account(facts, account, runs_in)
    chosen_qos = None
    if qos:
        chosen_qos = (_known("--qos", qos, facts.accounts.qos, "none of your accounts has it"), _ASKED)
    return Choice(
        partition=chosen_partition,
        account=chosen_account,
        qos=chosen_qos,
        time_limit=_time_limit(facts, runs_in),
        runs_in=runs_in,
    )


def usable(facts: ClusterFacts) -> list[str]:
    """Return the partitions with nodes that the user may use, those with nodes in service first."""
    names = [name for name in facts.open_partitions if facts.partitions[name].kinds]
    return sorted(names, key=lambda name: not any(kind.available for kind in facts.partitions[name].kinds))


def _chosen_partition(facts: ClusterFacts, wanted: str | None) -> tuple[str, str] | None:
    if wanted is not None:
        why = f"cluster {facts.name} has no such partition"
        return _known("--partition", wanted, tuple(facts.partitions), why), _ASKED
    default = facts.default_partition
    usable_names = usable(facts)
    if not usable_names or default in usable_names:
        return None
    if default is None:
        return usable_names[0], "the site has no default partition"
    why = facts.barred(default) or f"{facts.partitions[default].state.lower()} or without nodes"
    return usable_names[0], f"the site's default, {default}, is {why}"


def _chosen_account(facts: ClusterFacts, wanted: str | None, partition: str | None) -> tuple[str, str] | None:
    accounts = facts.accounts
    if wanted is not None:
        return _known("--account", wanted, accounts.names, "it is not one of your accounts"), _ASKED
    if not accounts.required or not accounts.names:
        return None
    accepted = facts.accounts_for(partition) if partition is not None else accounts.names
    if accounts.default is None:
        first = accepted[0] if accepted else accounts.names[0]
        return first, "the site runs no job without one, and you have no default one"
    if not accepted or accounts.default in accepted:
        return None
    return accepted[0], f"partition {partition} does not take {accounts.default}, your default one"


# A plugin of Slurm's own that refuses jobs without a time limit (slurm.conf(5), JobSubmitPlugins).
_REQUIRE_TIME_LIMIT = "require_timelimit"
_FIRST_LIMIT_S = HOUR


def _time_limit(facts: ClusterFacts, partition: str | None) -> tuple[str, str] | None:
    if _REQUIRE_TIME_LIMIT not in facts.submit_plugins:
        return None
    facts_of_partition = facts.partitions[partition] if partition is not None else None
    return str(time_limit_of(facts_of_partition, _FIRST_LIMIT_S)), "the site refuses jobs without one"


def time_limit_of(partition: Partition | None, wanted_s: int) -> TimeLimit:
    """Return a time limit that a partition allows.

    Args:
        partition: the partition; None allows any limit.
        wanted_s: the limit in seconds, if the partition allows it.
    """
    longest_s = None
    if partition is not None:
        with suppress(UnitError):
            longest_s = TimeLimit.parse(partition.max_time).seconds
    if longest_s is None:
        return TimeLimit(wanted_s)
    return TimeLimit(min(wanted_s, longest_s))


def _known(option: str, name: str, names: tuple[str, ...], why: str) -> str:
    """Return the name if it is one of ``names``, or if those are not known."""
    if not names or name in names:
        return name
    instead = did_you_mean(name, names, f"write one of {', '.join(names)}")
    raise UnknownChoiceError(f"{option} is {name!r}, and {why}; {instead}")


_COMMENT_COLUMN = 34
# Characters that tomlkit leaves in a quoted text, and that no file of settings may hold (hpcddp/jobfile/document.py).
_UNESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
_Line = tuple[Key | None, Item]
"""What a table of TOML is made of: a setting, or a comment, which has no key."""


def entry(key: str, value: object, comment: str = "", *, active: bool = True) -> _Line:
    """Return a setting with a comment at the end of its line.

    Args:
        value: a text, number, boolean, or a list of such.
        comment: text at the end of the line.
        active: whether the setting is active; if not, the whole line is a comment.
    """
    name = tomlkit.key(key)
    item = tomlkit.item(value)
    setting = f"{name.as_string()} = {item.as_string()}"
    width = len(setting) if active else len(f"# {setting}")
    space = " " * (max(_COMMENT_COLUMN - width, 0) + 2)
    if active:
        if comment:
            item.comment(_one_line(comment))
            item.trivia.comment_ws = space
        return name, item
    if comment:
        setting += f"{space}# {_one_line(comment)}"
    return None, tomlkit.comment(setting)


def comment(text: str) -> _Line:
    """Return a line that is a comment."""
    return None, tomlkit.comment(_one_line(text))


def _table(lines: Iterable[_Line]) -> Table:
    table = tomlkit.table()
    for key, item in lines:
        table.append(key, item)
    return table


def _one_line(text: str) -> str:
    return "".join(sign if sign.isprintable() else " " for sign in text)


def profile_text(name: str, facts: ClusterFacts, choice: Choice) -> str:
    """Return a profile as TOML."""
    document = tomlkit.document()
    for line in (
        f"Profile {name} of hpcddp for cluster {facts.name} (Slurm {facts.slurm}),",
        f"as {facts.user} saw it on {facts.looked_at}. You may change it.",
        "Above [cluster] are the settings of jobs whose job file and hpcddp.toml do not give them:",
        "run_root and the fields of resources, environment, checkpoint, requeue and launch.",
    ):
        document.append(*comment(line))
    document.add(tomlkit.nl())
    document.add("resources", _table(_resources(facts, choice)))
    document.add(tomlkit.nl())
    document.add("requeue", _table(_requeue(facts, choice)))
    document.add(FACTS, _facts(name, facts))
    # Names in Slurm need not be UTF-8; a TOML file must.
    text = document.as_string().encode("utf-8", "replace").decode("utf-8")
    return _UNESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _resources(facts: ClusterFacts, choice: Choice) -> Iterator[_Line]:
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


def describe_partition(partition: Partition) -> str:
    """Return nodes, GPUs and time limit of a partition in one line."""
    kinds = partition.kinds
    if not kinds:
        return "no nodes"
    cpus = max(kind.cpus for kind in kinds)
    memory = max(kind.mem_mb for kind in kinds)
    most = "" if len(kinds) == 1 else "up to "
    words = [f"{counted(partition.nodes, 'node')} of {most}{cpus} CPUs, {memory // 1024}G"]
    if partition.gpus_per_node:
        gpus = counted(partition.gpus_per_node, "GPU")
        if partition.gpu_types:
            gpus += f" ({', '.join(partition.gpu_types)})"
        words.append(gpus)
    words.append("no time limit" if partition.max_time == "UNLIMITED" else f"{partition.max_time} at most")
    return ", ".join(words)


def _account(facts: ClusterFacts, choice: Choice) -> Iterator[_Line]:
    accounts = facts.accounts
    if choice.account is not None:
        yield entry("account", *choice.account)
    elif accounts.required and not accounts.names:
        yield entry("account", "...", "the site runs no job without one, and names none of yours", active=False)
    for name in accounts.names:
        if choice.account is None or name != choice.account[0]:
            role = "your default account" if name == accounts.default else "another account of yours"
            yield entry("account", name, role, active=False)
    if choice.qos is not None:
        yield entry("qos", *choice.qos)


def _without_limit(partition: Partition) -> str:
    if partition.default_time is not None:
        return f"without it a job gets {partition.default_time}, at most {partition.max_time}"
    if partition.max_time == "UNLIMITED":
        return "without it a job has no limit; with a short one it starts sooner, and is requeued at its end"
    return f"without it a job gets {partition.max_time}, the most"


def _requeue(facts: ClusterFacts, choice: Choice) -> Iterator[_Line]:
    """Yield comments on the site's policy of preemption and requeue; no value needs to differ from the defaults."""
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
        comment="if Slurm refuses the requeue: a new job continues the run",
        active=False,
    )


def _preempted(name: str, partition: Partition, facts: ClusterFacts) -> str:
    preemption = facts.preemption
    mode = partition.preempt_mode.upper()
    if preemption.type == "qos" and preemption.mode != "OFF":
        return f"Jobs of another QOS may preempt a job ({preemption.mode}); its own QOS sets the time to save."
    if preemption.type == "none" or "OFF" in mode:
        return f"Nobody preempts the jobs of {name}."
    if "SUSPEND" in mode:
        return f"A preempted job of {name} is suspended, and continues later by itself."
    time = f"{preemption.kill_wait_s} s (KillWait)"
    if partition.grace_time_s:
        time = f"{partition.grace_time_s} s of grace and {time}"
    end = "requeued"
    if "CANCEL" in mode:
        end = "cancelled, unless it has been requeued before, which hpcddp does"
    return f"A preempted job of {name} has {time} to save; then it is {end}."


_PART_LIMITS = {
    "NO": "a job beyond its partition's limits is accepted, and waits for ever",
    "ANY": "a job that fits none of its partitions is refused",
    "ALL": "a job that does not fit each of its partitions is refused",
}


def _facts(profile: str, facts: ClusterFacts) -> Table:
    """Return the table ``cluster``."""
    table = _table(_cluster(profile, facts))
    table.add("accounts", _table(_accounts(facts)))
    table.add("preemption", _table(_preemption(facts)))
    partitions = tomlkit.table(is_super_table=True)
    for name, partition in facts.partitions.items():
        partitions.add(tomlkit.key(name), _table(_partition(name, partition, facts)))
    table.add("partitions", partitions)
    return table


def _cluster(profile: str, facts: ClusterFacts) -> Iterator[_Line]:
    yield comment("Facts about the cluster. No job takes a value from here; hpcddp submit refuses what cannot run.")
    yield comment(f"When the cluster has changed: hpcddp init {profile} --force")
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


def _accounts(facts: ClusterFacts) -> Iterator[_Line]:
    accounts = facts.accounts
    what = "a job needs an account that the site knows" if accounts.required else "no job needs an account"
    yield entry("required", accounts.required, what)
    if accounts.default is not None:
        yield entry("default", accounts.default, "of jobs that name none")
    if accounts.names:
        yield entry("names", accounts.names)
    if accounts.qos:
        yield entry("qos", accounts.qos)


def _preemption(facts: ClusterFacts) -> Iterator[_Line]:
    preemption = facts.preemption
    who = {
        "none": "no job preempts another",
        "partition_prio": "jobs preempt those of partitions with a lower priority_tier",
        "qos": "jobs preempt as the QOS settings allow",
    }
    yield entry("type", preemption.type, who.get(preemption.type, ""))
    yield entry("mode", preemption.mode, "of partitions without a preempt_mode")
    yield entry("kill_wait_s", preemption.kill_wait_s, "from SIGTERM to SIGKILL")
    yield entry("sends_user_signal", preemption.sends_user_signal, "whether a preempted job gets USR2, too")
    yield entry("requeue", preemption.requeue, "JobRequeue: whether jobs are requeued by default")
    yield entry("requeue_delay_s", preemption.requeue_delay_s, "Slurm's own; requeue.expedite shortens it")


def _partition(name: str, partition: Partition, facts: ClusterFacts) -> Iterator[_Line]:
    barred = facts.barred(name)
    yield entry("state", partition.state, f"you may not use it: {barred}" if barred else "")
    if partition.default:
        yield entry("default", value=True)
    if partition.hidden:
        yield entry("hidden", value=True)
    yield entry("max_time", partition.max_time)
    if partition.default_time is not None:
        yield entry("default_time", partition.default_time, "of jobs that name no time limit")
    if partition.max_nodes is not None:
        yield entry("max_nodes", partition.max_nodes, "of one job")
    who_may_use_it = {
        "allow_accounts": partition.allow_accounts,
        "deny_accounts": partition.deny_accounts,
        "allow_groups": partition.allow_groups,
        "allow_qos": partition.allow_qos,
    }
    for key, names in who_may_use_it.items():
        if names:
            yield entry(key, names)
    yield entry("priority_tier", partition.priority_tier)
    yield entry("preempt_mode", partition.preempt_mode)
    yield entry("grace_time_s", partition.grace_time_s)
    if partition.default_mem is not None:
        yield entry("default_mem", partition.default_mem, "of jobs that ask for none")
    kinds = tomlkit.array().multiline(multiline=True)
    for kind in partition.kinds:
        kinds.append(_kind_row(kind))
    yield tomlkit.key("kinds"), kinds


def _kind_row(kind: NodeKind) -> InlineTable:
    """Return a kind of nodes, without GPUs and features where it has none."""
    row = tomlkit.inline_table()
    row.update({"nodes": kind.nodes, "available": kind.available, "cpus": kind.cpus, "mem_mb": kind.mem_mb})
    if kind.gpus:
        row["gpus"] = kind.gpus
    if kind.gpu_types:
        row["gpu_types"] = kind.gpu_types
    if kind.features:
        row["features"] = kind.features
    return row


_LIMIT_S = 10 * MINUTE
_MEM_MB = 4 * 1024


def first_job(file: str, profile: str, facts: ClusterFacts, *, runs_in: str | None) -> str:
    """Return the text of a job file that runs on a cluster with its profile.

    It trains a ResNet-18 on handwritten digits on CPUs, which needs neither a GPU nor a download.
    """
    partition = None if runs_in is None else facts.partitions.get(runs_in)
    kinds = () if partition is None else partition.kinds
    most_cpus = max((kind.cpus for kind in kinds), default=2)
    tasks = 2 if most_cpus > 1 else 1
    lines = [
        f"# A first job on {facts.name}: a ResNet-18 learns handwritten digits on CPUs, which takes a minute or two.",
        "#",
        f"#   hpcddp submit {shlex.quote(file)} --follow    # run it, and watch",
        f"#   hpcddp render {shlex.quote(file)}             # the script that it is",
        "name: first-job",
    ]
    if profile != DEFAULT_PROFILE:
        lines.append(f"profile: {profile}")
    lines += ["", "resources:", f"  tasks_per_node: {tasks}        # one task is one rank"]
    if partition is not None and partition.gpus_per_node:
        gpus = partition.gpus_per_node
        lines.append(f"  # gpus_per_node: {gpus}       # in place of tasks_per_node: as many ranks, each with a GPU")
    lines += ["  cpus_per_task: 1", f'  time_limit: "{time_limit_of(partition, _LIMIT_S)}"']
    if facts.memory_is_shared_out:
        smallest_mb = min((kind.mem_mb for kind in kinds), default=_MEM_MB)
        memory = "4G" if smallest_mb >= _MEM_MB else f"{smallest_mb}M"
        lines.append(f"  mem: {memory}")
    lines += [
        "",
        "batch:",
        "  global_batch_size: 64    # samples of one optimizer step, over all ranks",
        "",
        "learning_rate:",
        "  base: 0.03",
        "",
        "train:",
        "  model: resnet18          # any of torchvision's, or your own: my_package.models:build",
        "  dataset: digits          # 1,797 images that come with scikit-learn; or your own: my_package.data:build",
        "  epochs: 2",
        "  optimizer: {name: sgd, momentum: 0.9}",
    ]
    return "".join(f"{line}\n" for line in lines)
