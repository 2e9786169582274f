"""The text of a sandbox's configuration files: slurm.conf, gres.conf and /etc/hosts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpcddp.errors import UserError

# Settings that differ between partitions. PriorityTier decides which jobs preempt others (slurm.conf(5)).
_PARTITIONS: Mapping[str, str] = {
    "low": "Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=10",
    "low0": "PriorityTier=1 PreemptMode=REQUEUE GraceTime=0",
    "lowc": "PriorityTier=1 PreemptMode=CANCEL GraceTime=20",
    "high": "PriorityTier=10 PreemptMode=OFF",
}
PARTITIONS = tuple(_PARTITIONS)
# Large enough for jobs of large machines; no job is limited to the memory that it requests.
_CLAIMED_MEMORY_MB = 1_000_000
_FIXED_SETTINGS: Mapping[str, str] = {
    "ClusterName": "sandbox",
    "AuthType": "auth/munge",
    "CredType": "cred/munge",
    # No accounting, binding or polling, to save time. Tests of proctrack/cgroup override this.
    "ProctrackType": "proctrack/linuxproc",
    "TaskPlugin": "task/none",
    "JobAcctGatherType": "jobacct_gather/none",
    "AccountingStorageType": "accounting_storage/none",
    # slurmctld checks that the program exists, although no mail is sent.
    "MailProg": "/bin/true",
    "SwitchType": "switch/none",
    "MpiDefault": "none",
    # Nodes claim more processors and memory than the machine has; without it they are "inval" (slurm.conf(5)).
    "SlurmdParameters": "config_overrides",
    # A node that was down returns to service by itself.
    "ReturnToService": "2",
    # A job starts when it is submitted, not at the next scheduling cycle.
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
    """The configuration of a sandbox.

    Attributes:
        directory: the directory of its files.
        user: the user that every daemon runs as.
        controller_host: the host name that slurmctld finds on its host.
        controller_address: the IPv4 address on which slurmctld listens.
        controller_port: slurmctld's port.
        node_host: the host name that all nodes share, None if each has its own.
        nodes: the nodes.
        cpus_per_node: processors that each node claims.
        gpus_per_node: GPUs that each node claims, 0 for none.
        overrides: settings of slurm.conf that the user changes.
        machine: address and name of this machine in the nodes' network, None if the nodes are this machine.
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
    machine: tuple[str, str] | None = None

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
        """Return the output file of a daemon, which holds errors from before the daemon opened its log."""
        return self.directory / "log" / f"{daemon}.out"

    def device_of(self, node: str, index: int) -> Path:
        """Return the file that stands for a node's GPU."""
        return self.directory / "dev" / f"{node}-gpu{index}"


def slurm_conf(cluster: Cluster, *, binds_srun: bool = True) -> str:
    """Return the text of slurm.conf (slurm.conf(5)).

    Args:
        cluster: the configuration of the sandbox.
        binds_srun: whether slurmd, and srun, which reads it later, listen on the address of their host's name only.
    """
    settings = merge_overrides({**_FIXED_SETTINGS, **_own_settings(cluster, binds_srun=binds_srun)}, cluster.overrides)
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
    # A node whose GPUs have a Count but no File is "inval".
    return _text(
        f"NodeName={node.name} Name=gpu File={cluster.device_of(node.name, index)}"
        for node in cluster.nodes
        for index in range(cluster.gpus_per_node)
    )


def hosts_file(cluster: Cluster) -> str:
    """Return the text of the nodes' own ``/etc/hosts``."""
    names = [("127.0.0.1", "localhost"), (cluster.controller_address, cluster.controller_host)]
    names += [(node.address, node.name) for node in cluster.nodes]
    if cluster.machine is not None:
        # Since 24.11 slurmctld looks for the host that has submitted a job, and waits for seconds if it is not there.
        names.append(cluster.machine)
    return _text(f"{address} {name}" for address, name in names)


def _own_settings(cluster: Cluster, *, binds_srun: bool) -> dict[str, str]:
    """Return the settings that depend on the sandbox's directory, addresses and user."""
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
        # Each process listens only on the address of its host's name, because all nodes share one host.
        settings["CommunicationParameters"] = "NoCtldInAddrAny,NoInAddrAny" if binds_srun else "NoCtldInAddrAny"
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


# Settings that the sandbox needs in order to find and end its daemons.
_KEPT = frozenset(
    {
        "slurmctldhost", "slurmctldaddr", "slurmctldport", "slurmdport", "controlmachine", "controladdr",
        "slurmuser", "slurmduser", "authtype", "credtype", "statesavelocation", "slurmdspooldir",
        "slurmctldpidfile", "slurmdpidfile", "slurmctldlogfile", "slurmdlogfile",
        "nodename", "nodeset", "partitionname", "downnodes", "frontendname", "include", "communicationparameters",
    }
)  # fmt: skip
_KEY = re.compile(r"[A-Za-z][A-Za-z0-9]*")


def parse_overrides(entries: Sequence[str]) -> dict[str, str]:
    """Return the settings that ``--conf`` options name.

    Args:
        entries: ``KEY=VALUE`` each; keys ignore case (slurm.conf(5)), and the last of two counts.

    Raises:
        UserError: an entry is not of that form, or the sandbox needs its own value.
    """
    written: dict[str, tuple[str, str]] = {}
    for entry in entries:
        key, equals, value = (part.strip() for part in entry.partition("="))
        if not equals or not _KEY.fullmatch(key) or not value:
            raise UserError(
                f"--conf is {entry!r}, which is not of the form KEY=VALUE; write for example --conf KillWait=5"
            )
        if not value.isprintable() or "#" in value:
            raise UserError(
                f"--conf {key} is {value!r}, and a value in slurm.conf ends at a line break or #; leave them out"
            )
        if key.lower() in _KEPT:
            raise UserError(f"--conf {key} cannot be changed, the sandbox needs its own; leave it out")
        written[key.lower()] = (key, value)
    overrides = dict(written.values())
    _check_auth_info(overrides)
    return overrides


def merge_overrides(settings: Mapping[str, str], overrides: Mapping[str, str]) -> dict[str, str]:
    """Return ``settings`` updated with ``overrides``, ignoring the case of keys.

    AuthInfo is a list: an override is appended to the sandbox's socket.

    Args:
        settings: the sandbox's own settings, in the order of the file.
        overrides: the user's settings; new keys are appended.
    """
    names = {name.lower(): name for name in settings}
    merged = dict(settings)
    for key, value in overrides.items():
        name = names.get(key.lower(), key)
        merged[name] = f"{merged[name]},{value}" if name == "AuthInfo" else value
    return merged


def _check_auth_info(overrides: Mapping[str, str]) -> None:
    value = next((value for key, value in overrides.items() if key.lower() == "authinfo"), "")
    if any(part.strip().lower().startswith("socket=") for part in value.split(",")):
        raise UserError(
            f"--conf AuthInfo is {value!r}, and the sandbox's munged has a socket of its own; leave socket= out"
        )
