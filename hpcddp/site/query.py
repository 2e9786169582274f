"""Query Slurm for partitions, limits, GPUs, accounts and preemption settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpcddp.slurm import commands

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
        silence: why there are no associations although the cluster has accounting.
    """

    config: str
    partitions: str
    nodes: str
    associations: str | None = None
    default_account: str | None = None
    silence: str | None = None


def ask_site(environment: Mapping[str, str], *, user: str) -> Answers:
    """Query the cluster that ``SLURM_CONF`` selects, or else the default one of this machine.

    Args:
        environment: the environment of the commands.
        user: the user whose accounts are queried.

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


def read_config(text: str) -> dict[str, str]:
    """Return the settings in the output of ``scontrol show config``, without those that are not set."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        # Later sections with a heading repeat some keys.
        if equals and value.strip() not in {"(null)", "N/A", ""}:
            found.setdefault(key.strip(), value.strip())
    return found


def _ask_accounts(answers: Answers, environment: Mapping[str, str], *, user: str, cluster: str) -> Answers:
    """Add the user's associations; slurmdbd may be down, which is not an error."""
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
