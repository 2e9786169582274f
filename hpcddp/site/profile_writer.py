"""Write a new profile and a first job file."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from hpcddp.errors import UserError, counted, did_you_mean
from hpcddp.jobfile.cluster import FACTS, ClusterFacts, Partition
from hpcddp.jobfile.profiles import DEFAULT_PROFILE
from hpcddp.jobfile.units import HOUR, MINUTE, TimeLimit, UnitError
from hpcddp.jobfile.write import write_values


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
        gpu_request: how Slurm is asked for GPUs, and the reason for it.
    """

    partition: tuple[str, str] | None
    account: tuple[str, str] | None
    qos: tuple[str, str] | None
    time_limit: tuple[str, str] | None
    runs_in: str | None
    gpu_request: tuple[str, str] | None = None


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
FIRST_LIMIT_S = HOUR
"""The time limit of a job that needs one, in seconds."""


def _time_limit(facts: ClusterFacts, partition: str | None) -> tuple[str, str] | None:
    if _REQUIRE_TIME_LIMIT not in facts.submit_plugins:
        return None
    facts_of_partition = facts.partitions[partition] if partition is not None else None
    return str(time_limit_of(facts_of_partition, FIRST_LIMIT_S)), "the site refuses jobs without one"


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


def _setting(key: str, value: str, comment: str, *, active: bool = True) -> str:
    """Return the line of a setting, with a comment at its end.

    Args:
        active: whether the setting is active; if not, the whole line is a comment.
    """
    setting = write_values({key: value}).rstrip("\n")
    if not active:
        setting = f"# {setting}"
    return f"  {setting:<{_COMMENT_COLUMN}}  # {_one_line(comment)}"


def _one_line(text: str) -> str:
    return "".join(sign if sign.isprintable() else " " for sign in text)


def profile_text(name: str, facts: ClusterFacts, choice: Choice) -> str:
    """Return a profile as YAML."""
    lines = [
        _one_line(f"# Profile {name} of hpcddp for cluster {facts.name} (Slurm {facts.slurm}),"),
        _one_line(f"# as {facts.user} saw it on {facts.looked_at}. You may change it."),
        "# Above cluster are the settings of jobs whose job file and hpcddp.yaml do not give them:",
        "# run_root and the fields of resources, environment, checkpoint, requeue and launch.",
        "",
        "resources:",
        *_resources(facts, choice),
        "",
        "# Facts about the cluster. No job takes a value from here; hpcddp submit refuses what cannot run.",
        f"# When the cluster has changed: hpcddp init {name} --force",
        write_values({FACTS: facts.model_dump(mode="json", exclude_defaults=True)}),
    ]
    # Names in Slurm need not be UTF-8; a YAML file must.
    return "\n".join(lines).encode("utf-8", "replace").decode("utf-8")


def _resources(facts: ClusterFacts, choice: Choice) -> Iterator[str]:
    if choice.partition is not None:
        yield _setting("partition", *choice.partition)
    for name in usable(facts):
        if choice.partition is None or name != choice.partition[0]:
            partition = facts.partitions[name]
            role = "the default one: " if partition.default else ""
            yield _setting("partition", name, f"{role}{describe_partition(partition)}", active=False)
    yield from _account(facts, choice)
    if choice.gpu_request is not None:
        yield _setting("gpu_request", *choice.gpu_request)
    if choice.time_limit is not None:
        yield _setting("time_limit", *choice.time_limit)
    elif choice.runs_in is not None:
        yield _setting("time_limit", "1:00:00", _without_limit(facts.partitions[choice.runs_in]), active=False)
    if facts.memory_is_shared_out and choice.runs_in is not None:
        default = facts.partitions[choice.runs_in].default_mem
        without = f"without it a job gets {default}" if default else "without it a job gets all memory of its nodes"
        yield _setting("mem", "32G", without, active=False)


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


def _account(facts: ClusterFacts, choice: Choice) -> Iterator[str]:
    accounts = facts.accounts
    if choice.account is not None:
        yield _setting("account", *choice.account)
    elif accounts.required and not accounts.names:
        yield _setting("account", "...", "the site runs no job without one, and names none of yours", active=False)
    for name in accounts.names:
        if choice.account is None or name != choice.account[0]:
            role = "your default account" if name == accounts.default else "another account of yours"
            yield _setting("account", name, role, active=False)
    if choice.qos is not None:
        yield _setting("qos", *choice.qos)


def _without_limit(partition: Partition) -> str:
    if partition.default_time is not None:
        return f"without it a job gets {partition.default_time}, at most {partition.max_time}"
    if partition.max_time == "UNLIMITED":
        return "without it a job has no limit; with a short one it starts sooner, and is requeued at its end"
    return f"without it a job gets {partition.max_time}, the most"


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
