"""The text of a sandbox's configuration files: a pure function of what the sandbox is to be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hpcddp.rehearse.overrides import merge_overrides

# Each line is a partition's name and what sets it apart. PriorityTier decides who preempts whom (slurm.conf(5)).
_PARTITIONS: Mapping[str, str] = {
    "low": "Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=10",
    "low0": "PriorityTier=1 PreemptMode=REQUEUE GraceTime=0",
    "lowc": "PriorityTier=1 PreemptMode=CANCEL GraceTime=20",
    "high": "PriorityTier=10 PreemptMode=OFF",
}
PARTITIONS = tuple(_PARTITIONS)

# Jobs written for a large machine must fit: nothing limits a job to the memory that it asked for.
_CLAIMED_MEMORY_MB = 1_000_000

_FIXED_SETTINGS: Mapping[str, str] = {
    "ClusterName": "sandbox",
    "AuthType": "auth/munge",
    "CredType": "cred/munge",
    # Light: nobody is accounted for, bound or polled. Tests of proctrack/cgroup override this.
    "ProctrackType": "proctrack/linuxproc",
    "TaskPlugin": "task/none",
    "JobAcctGatherType": "jobacct_gather/none",
    "AccountingStorageType": "accounting_storage/none",
    # Nobody gets mail; slurmctld looks for the program all the same.
    "MailProg": "/bin/true",
    "SwitchType": "switch/none",
    "MpiDefault": "none",
    # Nodes claim more processors and memory than there are; without it they are "inval" (slurm.conf(5)).
    "SlurmdParameters": "config_overrides",
    # A node that was down comes back by itself.
    "ReturnToService": "2",
    # Quick: a job starts when it is submitted, not at the next scheduling cycle.
    "SchedulerType": "sched/backfill",
    "SchedulerParameters": "sched_min_interval=0,batch_sched_delay=0,bf_interval=1",
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_Core",
    "PreemptType": "preempt/partition_prio",
    "PreemptMode": "REQUEUE",
    "JobRequeue": "1",
    "KillWait": "15",
    "SlurmdTimeout": "15",
    "MaxJobCount": "10000",
    # A job that has ended can be asked about for an hour.
    "MinJobAge": "3600",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node of the sandbox.

    Attributes:
        name: its name in Slurm; with hosts of its own also its host name.
        address: the IPv4 address on which its slurmd listens.
        port: slurmd's port.
    """

    name: str
    address: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What a sandbox is to be.

    Attributes:
        directory: where its files are.
        user: the user that every daemon runs as.
        controller_host: the host name that slurmctld finds on its host.
        controller_address: the IPv4 address on which slurmctld listens.
        controller_port: slurmctld's port.
        node_host: the host name that all nodes share, None if each has its own.
        nodes: the nodes.
        cpus_per_node: processors that each node claims.
        gpus_per_node: GPUs that each node claims, 0 for none.
        overrides: settings of slurm.conf that the user changes.
    """

    directory: Path
    user: str
    controller_host: str
    controller_address: str
    controller_port: int
    node_host: str | None
    nodes: tuple[Node, ...]
    cpus_per_node: int
    gpus_per_node: int
    overrides: Mapping[str, str] = field(default_factory=dict)

    @property
    def slurm_conf(self) -> Path:
        """The file that ``SLURM_CONF`` names."""
        return self.directory / "slurm.conf"

    @property
    def munge_socket(self) -> Path:
        """The socket of the sandbox's own munged."""
        return self.directory / "munge" / "socket"

    def log_of(self, daemon: str) -> Path:
        """Return the log of a daemon: ``munged``, ``slurmctld`` or a node's name."""
        return self.directory / "log" / f"{daemon}.log"

    def output_of(self, daemon: str) -> Path:
        """Return the file of what a daemon prints: it holds what went wrong before the daemon opened its log."""
        return self.directory / "log" / f"{daemon}.out"

    def device_of(self, node: str, index: int) -> Path:
        """Return the file that stands for a node's GPU."""
        return self.directory / "dev" / f"{node}-gpu{index}"


def slurm_conf(cluster: Cluster) -> str:
    """Return the text of slurm.conf (slurm.conf(5)).

    Args:
        cluster: what the sandbox is to be.
    """
    settings = merge_overrides({**_FIXED_SETTINGS, **_own_settings(cluster)}, cluster.overrides)
    lines = [f"{key}={value}" for key, value in settings.items()]
    lines += [_node_line(cluster, node) for node in cluster.nodes]
    lines += [
        f"PartitionName={name} Nodes=ALL MaxTime=INFINITE State=UP {rest}".rstrip()
        for name, rest in _PARTITIONS.items()
    ]
    return _text(lines)


def gres_conf(cluster: Cluster) -> str:
    """Return the text of gres.conf: which file stands for which GPU (gres.conf(5))."""
    if cluster.gpus_per_node == 0:
        return ""
    # A node whose GPUs have a Count and no File is "inval".
    return _text(
        f"NodeName={node.name} Name=gpu File={cluster.device_of(node.name, index)}"
        for node in cluster.nodes
        for index in range(cluster.gpus_per_node)
    )


def hosts_file(cluster: Cluster) -> str:
    """Return the text of the nodes' own ``/etc/hosts``."""
    names = [("127.0.0.1", "localhost"), (cluster.controller_address, cluster.controller_host)]
    names += [(node.address, node.name) for node in cluster.nodes]
    return _text(f"{address} {name}" for address, name in names)


def _own_settings(cluster: Cluster) -> dict[str, str]:
    """Return the settings that follow from where the sandbox is and who runs it."""
    directory = cluster.directory
    settings = {
        "SlurmctldHost": f"{cluster.controller_host}({cluster.controller_address})",
        "SlurmctldPort": str(cluster.controller_port),
        "SlurmUser": cluster.user,
        "SlurmdUser": cluster.user,
        "AuthInfo": f"socket={cluster.munge_socket}",
        "StateSaveLocation": f"{directory}/state",
        "SlurmdSpoolDir": f"{directory}/spool/%n",
        "SlurmctldPidFile": f"{directory}/run/slurmctld.pid",
        "SlurmdPidFile": f"{directory}/run/%n.pid",
        "SlurmctldLogFile": str(cluster.log_of("slurmctld")),
        "SlurmdLogFile": str(cluster.log_of("%n")),
    }
    if cluster.node_host is not None:
        # Without hosts of its own the sandbox listens on loopback only.
        settings["CommunicationParameters"] = "NoInAddrAny"
    if cluster.gpus_per_node:
        settings["GresTypes"] = "gpu"
    return settings


def _node_line(cluster: Cluster, node: Node) -> str:
    host = "" if cluster.node_host is None else f" NodeHostname={cluster.node_host}"
    gres = f" Gres=gpu:{cluster.gpus_per_node}" if cluster.gpus_per_node else ""
    return (
        f"NodeName={node.name}{host} NodeAddr={node.address} Port={node.port} CPUs={cluster.cpus_per_node} Sockets=1 "
        f"CoresPerSocket={cluster.cpus_per_node} ThreadsPerCore=1 RealMemory={_CLAIMED_MEMORY_MB}{gres} State=UNKNOWN"
    )


def _text(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
