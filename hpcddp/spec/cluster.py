"""What a profile knows of its cluster: facts that ``hpcddp init`` found. No job takes them; jobs are held to them."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, ValidationError

from hpcddp.spec.document import dotted
from hpcddp.spec.problems import Problem, shown
from hpcddp.spec.settings import Settings, SettingsError

FACTS = "cluster"
"""The table of a profile that holds them."""


class Facts(BaseModel):
    """Facts of one kind; what a later version has found besides does not disturb."""

    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True)


class NodeKind(Facts):
    """Nodes of a partition that are alike.

    Attributes:
        nodes: how many there are.
        available: how many of them were up.
        cpus: CPUs of each, as Slurm counts them.
        mem_mb: memory of each that jobs may use, in MiB.
        gpus: GPUs of each.
        gpu_types: how many of which type, where the site names types.
        features: what ``resources.constraint`` may ask for.
    """

    nodes: int
    available: int = 0
    cpus: int
    mem_mb: int
    gpus: int = 0
    gpu_types: Mapping[str, int] = {}
    features: tuple[str, ...] = ()


class Partition(Facts):
    """A partition.

    Attributes:
        state: UP, DOWN (jobs wait), DRAIN or INACTIVE (jobs are refused).
        default: whether jobs go there that name none.
        hidden: whether sinfo hides it.
        max_time: the longest time limit, in Slurm's words.
        default_time: the limit of jobs that name none, in Slurm's words; None is ``max_time``.
        max_nodes: the most nodes of one job; None has no limit.
        allow_accounts: the only accounts that may use it; None is everybody.
        deny_accounts: accounts that may not.
        allow_groups: the only groups that may use it; None is everybody.
        allow_qos: the only QOS that may use it; None is each.
        preempt_mode: what happens to its jobs when others preempt them: OFF, REQUEUE, CANCEL, SUSPEND ...
        grace_time_s: how long they have to leave, in seconds.
        priority_tier: jobs of a higher tier preempt those of a lower one.
        default_mem: memory of jobs that ask for none, such as "2G per CPU"; None is all of the node.
        kinds: its nodes.
    """

    state: str = "UP"
    default: bool = False
    hidden: bool = False
    max_time: str = "UNLIMITED"
    default_time: str | None = None
    max_nodes: int | None = None
    allow_accounts: tuple[str, ...] | None = None
    deny_accounts: tuple[str, ...] = ()
    allow_groups: tuple[str, ...] | None = None
    allow_qos: tuple[str, ...] | None = None
    preempt_mode: str = "OFF"
    grace_time_s: int = 0
    priority_tier: int = 1
    default_mem: str | None = None
    kinds: tuple[NodeKind, ...] = ()

    @property
    def nodes(self) -> int:
        """How many nodes it has."""
        return sum(kind.nodes for kind in self.kinds)

    @property
    def gpus_per_node(self) -> int:
        """GPUs of the node that has most."""
        return max((kind.gpus for kind in self.kinds), default=0)

    def takes(self, account: str) -> bool:
        """Return whether an account may use it."""
        return (self.allow_accounts is None or account in self.allow_accounts) and account not in self.deny_accounts

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """The types of its GPUs, in the order of their names."""
        return tuple(sorted({name for kind in self.kinds for name in kind.gpu_types}))


class Accounts(Facts):
    """Who pays.

    Attributes:
        required: whether the site refuses a job whose account it does not know.
        default: the account of jobs that name none; None where there is none or it is not known.
        names: the user's accounts; empty where they are not known.
        qos: the user's QOS, over all accounts.
    """

    required: bool = False
    default: str | None = None
    names: tuple[str, ...] = ()
    qos: tuple[str, ...] = ()


class Preemption(Facts):
    """What happens to a job that has to leave.

    Attributes:
        type: who preempts whom: none, partition_prio, qos.
        mode: what happens to a job that is preempted, where its partition says nothing else.
        kill_wait_s: seconds from SIGTERM to SIGKILL.
        sends_user_signal: whether a preempted job gets the signal of its time limit too.
        requeue: whether Slurm requeues jobs that say nothing about it.
        requeue_delay_s: how long a requeued job waits before it starts again, in seconds.
    """

    type: str = "none"
    mode: str = "OFF"
    kill_wait_s: int = 30
    sends_user_signal: bool = False
    requeue: bool = True
    requeue_delay_s: int = 121


class ClusterFacts(Facts):
    """A cluster, as one user sees it.

    Attributes:
        name: its name in Slurm.
        slurm: Slurm's version.
        looked_at: the day on which this was found.
        user: who looked.
        groups: the user's groups.
        enforce_part_limits: whether a job beyond its partition's limits is refused at submit (ANY, ALL) or waits (NO).
        memory_is_shared_out: whether a node's memory is shared out to jobs; if not, nobody waits for it.
        disable_root_jobs: whether root may not submit.
        max_array_size: the index of an array's element is below it.
        submit_plugins: the site's own rules, which may change or refuse any job.
        accounts: who pays.
        preemption: what happens to a job that has to leave.
        partitions: the partitions by name.
    """

    name: str
    slurm: str = ""
    looked_at: str = ""
    user: str = ""
    groups: tuple[str, ...] = ()
    enforce_part_limits: str = "NO"
    memory_is_shared_out: bool = False
    disable_root_jobs: bool = False
    max_array_size: int | None = None
    submit_plugins: tuple[str, ...] = ()
    accounts: Accounts = Accounts()
    preemption: Preemption = Preemption()
    partitions: Mapping[str, Partition] = {}

    def barred(self, name: str) -> str | None:
        """Return why the user may not use a partition, as the end of a sentence; None where nothing speaks against it.

        Args:
            name: one of ``partitions``.
        """
        partition, mine = self.partitions[name], self.accounts.names
        groups, accounts = partition.allow_groups, partition.allow_accounts
        # Slurm asks root for no group (slurm.conf(5), AllowGroups).
        if groups is not None and self.user != "root" and not set(groups) & set(self.groups):
            return f"only for the groups {', '.join(groups)}"
        if self.accounts.required and mine and not self.accounts_for(name):
            return f"only for the accounts {', '.join(accounts)}" if accounts else "closed to your accounts"
        return None

    def accounts_for(self, name: str) -> tuple[str, ...]:
        """Return the user's accounts that a partition takes.

        Args:
            name: one of ``partitions``.
        """
        return tuple(account for account in self.accounts.names if self.partitions[name].takes(account))

    @property
    def open_partitions(self) -> list[str]:
        """The names of the partitions that are up and open to the user."""
        return [name for name, one in self.partitions.items() if one.state == "UP" and self.barred(name) is None]

    @property
    def default_partition(self) -> str | None:
        """Where jobs go that name no partition; None where the site has no such partition."""
        return next((name for name, partition in self.partitions.items() if partition.default), None)


def read_facts(settings: Settings, *, name: str) -> ClusterFacts | None:
    """Return what a profile knows of its cluster, or None where it says nothing.

    Args:
        settings: what the profile holds.
        name: the profile's name.

    Raises:
        SettingsError: a fact is none; each is named.
    """
    found = settings.values.get(FACTS)
    if found is None:
        return None
    try:
        return ClusterFacts.model_validate(found)
    except ValidationError as error:
        raise SettingsError(*(_no_fact(details, settings, name) for details in error.errors())) from None


def _no_fact(details: Mapping[str, object], settings: Settings, name: str) -> Problem:
    location = details["loc"]
    path = (FACTS, *(str(part) for part in location)) if isinstance(location, tuple) else (FACTS,)
    missing = details["type"] == "missing"
    what = "is missing" if missing else f"is {shown(details['input'])}, which hpcddp init would not have written"
    return Problem(
        file=settings.source.file,
        line=settings.source.line_of(path),
        key=dotted(path),
        sentence=f"{what}; write the file anew with hpcddp init {name} --force, or remove the table [{FACTS}]",
    )
