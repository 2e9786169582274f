"""The daemons of a sandbox and how each is started."""

from __future__ import annotations

from pathlib import Path

from hpcddp.sandbox.configuration import Cluster, Node
from hpcddp.sandbox.instructions import Daemon
from hpcddp.sandbox.network import on_node


def daemons_of(cluster: Cluster) -> tuple[Daemon, ...]:
    """Return the daemons in the order in which they are started, each in the foreground."""
    return (_munged(cluster), _slurmctld(cluster), *(_slurmd(cluster, node) for node in cluster.nodes))


def directories_of(cluster: Cluster) -> tuple[Path, ...]:
    """Return the directories that the daemons need."""
    names = ["log", "run", "state", "dev", "munge", *(f"spool/{node.name}" for node in cluster.nodes)]
    return tuple(cluster.directory / name for name in names)


def key_of(cluster: Cluster) -> Path:
    """Return the file of the sandbox's own key, which only its owner may read (munged(8))."""
    return cluster.directory / "munge" / "key"


def _munged(cluster: Cluster) -> Daemon:
    own = cluster.directory / "munge"
    return Daemon(
        name="munged",
        argv=(
            "munged",
            "--foreground",
            # The log's directory may be under one that a group can write to, such as a temporary one.
            "--force",
            f"--key-file={key_of(cluster)}",
            f"--socket={cluster.munge_socket}",
            f"--pid-file={own}/pid",
            f"--log-file={cluster.log_of('munged')}",
            f"--seed-file={own}/seed",
        ),
        output=cluster.output_of("munged"),
        ready_socket=cluster.munge_socket,
    )


def _slurmctld(cluster: Cluster) -> Daemon:
    return Daemon(
        name="slurmctld",
        argv=("slurmctld", "-D", "-f", str(cluster.slurm_conf)),
        output=cluster.output_of("slurmctld"),
        ready_address=(cluster.controller_address, cluster.controller_port),
    )


def _slurmd(cluster: Cluster, node: Node) -> Daemon:
    enter = on_node(cluster.directory, node.name) if cluster.node_host is None else ()
    return Daemon(
        name=node.name,
        argv=(*enter, "slurmd", "-D", "-f", str(cluster.slurm_conf), "-N", node.name),
        output=cluster.output_of(node.name),
    )
