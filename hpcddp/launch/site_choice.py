"""What a new profile gives every job: as little as the site needs, and what its user asks for."""

from __future__ import annotations

from dataclasses import dataclass

from hpcddp.errors import UserError
from hpcddp.spec.cluster import ClusterFacts, Partition
from hpcddp.spec.names import nearest
from hpcddp.spec.units import HOUR, TimeLimit, UnitError

# A plugin of Slurm's own that refuses jobs without a time limit (slurm.conf(5), JobSubmitPlugins).
_REQUIRE_TIME_LIMIT = "require_timelimit"
_FIRST_LIMIT_S = HOUR
_ASKED = "as you asked"


class UnknownChoiceError(UserError):
    """The cluster does not have what was asked for."""

    kind = "choice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a new profile gives every job; None leaves it to Slurm.

    Args:
        partition: the partition, and why it has to be said.
        account: likewise.
        qos: likewise.
        time_limit: likewise.
        runs_in: where a job goes with it: the partition, or the site's default one; None where there is none to use.
    """

    partition: tuple[str, str] | None
    account: tuple[str, str] | None
    qos: tuple[str, str] | None
    time_limit: tuple[str, str] | None
    runs_in: str | None


def choose(facts: ClusterFacts, *, partition: str | None, account: str | None, qos: str | None) -> Choice:
    """Return what the profile of a cluster gives every job.

    Args:
        facts: what was found.
        partition: what the user wants; None leaves the choice to us.
        account: likewise.
        qos: likewise.

    Raises:
        UnknownChoiceError: the cluster has no such thing.
    """
    place = _partition(facts, partition)
    runs_in = place[0] if place else facts.default_partition
    return Choice(
        partition=place,
        account=_account(facts, account, runs_in),
        qos=(_known("--qos", qos, facts.accounts.qos, "none of your accounts has it"), _ASKED) if qos else None,
        time_limit=_time_limit(facts, runs_in),
        runs_in=runs_in,
    )


def usable(facts: ClusterFacts) -> list[str]:
    """Return the partitions that run this user's jobs, those with nodes in service first."""
    names = [name for name in facts.open_partitions if facts.partitions[name].kinds]
    return sorted(names, key=lambda name: not any(kind.available for kind in facts.partitions[name].kinds))


def time_limit_of(partition: Partition | None, wanted_s: int) -> TimeLimit:
    """Return a time limit that a partition takes.

    Args:
        partition: the partition; None takes any.
        wanted_s: the limit in seconds, if the partition takes it.
    """
    try:
        longest = TimeLimit.parse(partition.max_time).seconds if partition is not None else None
    except UnitError:
        longest = None
    return TimeLimit(wanted_s if longest is None else min(wanted_s, longest))


def _partition(facts: ClusterFacts, wanted: str | None) -> tuple[str, str] | None:
    if wanted is not None:
        why = f"cluster {facts.name} has no such partition"
        return _known("--partition", wanted, tuple(facts.partitions), why), _ASKED
    default, fit = facts.default_partition, usable(facts)
    if (default is not None and default in fit) or not fit:
        return None
    if default is None:
        return fit[0], "the site has no default partition"
    why = facts.barred(default) or f"{facts.partitions[default].state.lower()} or without nodes"
    return fit[0], f"the site's default, {default}, is {why}"


def _account(facts: ClusterFacts, wanted: str | None, partition: str | None) -> tuple[str, str] | None:
    accounts = facts.accounts
    if wanted is not None:
        return _known("--account", wanted, accounts.names, "it is no account of yours"), _ASKED
    if not accounts.required or not accounts.names:
        return None
    taken = facts.accounts_for(partition) if partition is not None else accounts.names
    if accounts.default is not None and (accounts.default in taken or not taken):
        return None
    if accounts.default is not None:
        return taken[0], f"partition {partition} does not take {accounts.default}, your default one"
    return (taken or accounts.names)[0], "the site runs no job without one, and you have no default one"


def _time_limit(facts: ClusterFacts, partition: str | None) -> tuple[str, str] | None:
    if _REQUIRE_TIME_LIMIT not in facts.submit_plugins:
        return None
    place = facts.partitions[partition] if partition is not None else None
    return str(time_limit_of(place, _FIRST_LIMIT_S)), "the site refuses jobs without one"


def _known(option: str, name: str, names: tuple[str, ...], why: str) -> str:
    """Return a name that is known; where none is, each may be right."""
    if not names or name in names:
        return name
    near = nearest(name, names)
    instead = f"did you mean {near}?" if near else f"write one of {', '.join(names)}"
    raise UnknownChoiceError(f"{option} is {name!r}, and {why}; {instead}")
