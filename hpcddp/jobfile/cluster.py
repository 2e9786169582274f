"""Facts about a cluster, found by ``hpcddp init`` and stored in a profile; jobs are checked against them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict

Cluster = Literal["slurm", "local", "here"]
"""Where a job goes: to Slurm's queue, to this machine alone, or into the allocation that this shell is in."""
FACTS = "cluster"
"""The table of a profile with the facts."""


class Facts(BaseModel):
    """Facts of one kind; fields of later versions are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True, defer_build=True)


class NodeKind(Facts):
    """Nodes of a partition with the same hardware.

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
        default: whether it is the partition of jobs that name none.
        hidden: whether sinfo hides it.
        max_time: the longest time limit, in Slurm's format.
        default_time: the limit of jobs that name none, in Slurm's format; None is ``max_time``.
        max_nodes: the most nodes of one job; None has no limit.
        allow_accounts: the only accounts that may use it; None is everybody.
        deny_accounts: accounts that may not.
        allow_groups: the only groups that may use it; None is everybody.
        allow_qos: the only QOS that may use it; None is each.
        preempt_mode: what happens to its jobs when others preempt them: OFF, REQUEUE, CANCEL, SUSPEND ...
        grace_time_s: how long they have to leave, in seconds.
        priority_tier: jobs of a higher tier preempt those of a lower one.
        default_mem: memory of jobs that ask for none, such as "2G per CPU"; None is all of the node.
        whole_nodes: whether each job gets all of its nodes, their GPUs included.
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
    whole_nodes: bool = False
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
    """Accounts of the user, and whether jobs need one.

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
    """Preemption settings of the cluster.

    Attributes:
        type: PreemptType: none, partition_prio, qos.
        mode: what happens to a preempted job, unless its partition has another mode.
        kill_wait_s: seconds from SIGTERM to SIGKILL.
        sends_user_signal: whether a preempted job gets the signal of its time limit too.
        requeue: whether Slurm requeues jobs without ``--requeue`` and ``--no-requeue``.
        requeue_delay_s: how long a requeued job waits before it starts again, in seconds.
    """

    type: str = "none"
    mode: str = "OFF"
    kill_wait_s: int = 30
    sends_user_signal: bool = False
    requeue: bool = True
    requeue_delay_s: int = 121


class ClusterFacts(Facts):
    """Facts about a cluster, as one user sees it.

    Attributes:
        name: its name in Slurm.
        slurm: Slurm's version.
        looked_at: the day on which this was found.
        user: who looked.
        groups: the user's groups.
        enforce_part_limits: whether a job beyond its partition's limits is refused at submit (ANY, ALL) or waits (NO).
        memory_is_shared_out: whether Slurm allocates memory to jobs; if not, no job waits for memory.
        disable_root_jobs: whether root may not submit.
        max_array_size: the index of an array's element is below it.
        submit_plugins: job submit plugins of the site, which may change or reject any job.
        accounts: accounts of the user.
        preemption: preemption settings.
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
        """Return why the user may not use a partition, as the end of a sentence, or None if the user may."""
        partition = self.partitions[name]
        mine = self.accounts.names
        groups = partition.allow_groups
        accounts = partition.allow_accounts
        # AllowGroups does not apply to root (slurm.conf(5)).
        if groups is not None and self.user != "root" and not set(groups) & set(self.groups):
            return f"only for the groups {', '.join(groups)}"
        if self.accounts.required and mine and not self.accounts_for(name):
            if accounts:
                return f"only for the accounts {', '.join(accounts)}"
            return "closed to your accounts"
        return None

    def accounts_for(self, name: str) -> tuple[str, ...]:
        """Return the user's accounts that may use a partition."""
        return tuple(account for account in self.accounts.names if self.partitions[name].takes(account))

    @property
    def open_partitions(self) -> list[str]:
        """The names of the partitions that are up and open to the user."""
        return [
            name for name, partition in self.partitions.items() if partition.state == "UP" and self.barred(name) is None
        ]

    @property
    def default_partition(self) -> str | None:
        """The partition of jobs that name none; None where the site has no default partition."""
        return next((name for name, partition in self.partitions.items() if partition.default), None)
