"""Asking Slurm about its cluster: partitions, limits, GPUs, accounts, and how it preempts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpcddp.slurm import commands

# What these hold would change which partitions are shown, and how (sinfo(1), scontrol(1), ENVIRONMENT VARIABLES).
_TASTES = ("SINFO_", "SCONTROL_", "SLURM_TIME_FORMAT")

NODE_FORMAT = "%R|%D|%T|%c|%m|%G|%f"
"""Partition, nodes, their state, CPUs, MiB of memory, GRES and features (sinfo(1))."""

_NO_ACCOUNTING = "accounting_storage/none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What Slurm's commands printed.

    Args:
        config: ``scontrol show config``.
        partitions: ``scontrol show partition``, a line each, hidden ones too.
        nodes: ``sinfo`` in ``NODE_FORMAT``.
        associations: ``sacctmgr show assoc`` of the user, ``Account|QOS`` in each line; None where nobody keeps
            accounts or nobody answers.
        default_account: ``sacctmgr show user``; None likewise.
        silence: why there are no associations, where somebody keeps them.
    """

    config: str
    partitions: str
    nodes: str
    associations: str | None = None
    default_account: str | None = None
    silence: str | None = None


def ask_site(environment: Mapping[str, str], *, user: str) -> Answers:
    """Ask the cluster that ``SLURM_CONF`` names, or this machine's.

    Args:
        environment: the environment of the commands.
        user: whose accounts are asked for.

    Raises:
        SlurmUnavailableError: Slurm's commands are not here, or no controller answers.
        SlurmCommandError: the controller refused a question.
    """
    clean = {name: value for name, value in environment.items() if not name.startswith(_TASTES)}
    answers = Answers(
        config=commands.ask("scontrol", "show", "config", environment=clean),
        partitions=commands.ask("scontrol", "--all", "--oneliner", "show", "partition", environment=clean),
        nodes=commands.ask("sinfo", "--all", "--noheader", "--exact", f"--format={NODE_FORMAT}", environment=clean),
    )
    config = read_config(answers.config)
    if config.get("AccountingStorageType", _NO_ACCOUNTING) == _NO_ACCOUNTING:
        return answers
    return _ask_accounts(answers, clean, user=user, cluster=config.get("ClusterName", ""))


def read_config(text: str) -> dict[str, str]:
    """Return the settings in what ``scontrol show config`` printed; those that are not set are left out.

    Args:
        text: a line ``Key = value`` for each.
    """
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        # What follows under a heading of its own repeats some keys.
        if equals and value.strip() not in {"(null)", "N/A", ""}:
            found.setdefault(key.strip(), value.strip())
    return found


def _ask_accounts(answers: Answers, environment: Mapping[str, str], *, user: str, cluster: str) -> Answers:
    """Add what the accounting knows of the user; it may be away, and is never needed."""
    listing = ("sacctmgr", "--noheader", "--parsable2", "--readonly", "show")
    where = ("assoc", "where", f"user={user}", f"cluster={cluster}", "format=Account,QOS")
    associations = default_account = silence = None
    try:
        associations = commands.ask(*listing, *where, environment=environment)
        default_account = commands.ask(
            *listing, "user", "where", f"name={user}", "format=DefaultAccount", environment=environment
        )
    except commands.SlurmCommandError as error:
        silence = error.message
    return Answers(
        config=answers.config,
        partitions=answers.partitions,
        nodes=answers.nodes,
        associations=associations,
        default_account=default_account,
        silence=silence,
    )
