"""Choose names, addresses and ports that are free on this machine, and write the files of a sandbox."""

from __future__ import annotations

import secrets
import socket

from hpcddp.run.files import write_text
from hpcddp.sandbox import cgroups, configuration, daemons, network, start
from hpcddp.sandbox.configuration import PARTITIONS, Cluster, Node
from hpcddp.sandbox.request import Request, user_name
from hpcddp.sandbox.state import Sandbox

_MUNGE_KEY_BYTES = 128


def plan(request: Request, token: str) -> tuple[Sandbox, Cluster]:
    """Choose every name, address and port.

    Args:
        request: the requested sandbox.
        token: the new sandbox's token, in hexadecimal.
    """
    names = tuple(f"n{number}" for number in range(1, request.nodes + 1))
    # Each sandbox starts its search at a different place.
    first = int(token, 16)
    if request.isolated:
        subnet = network.free_subnet(start.networks_in_use(start.daemon_environment(token)), first)
        host, address, port = network.CONTROLLER_HOST, network.controller_address(subnet), network.CONTROLLER_PORT
        places = [(one, network.NODE_PORT) for one in network.node_addresses(subnet, len(names))]
    else:
        host, address = socket.gethostname().partition(".")[0], start.host_address()
        port, *ports = start.free_ports(1 + len(names), start=first)
        places = [(address, one) for one in ports]
    nodes = tuple(Node(name=name, address=at, port=on) for name, (at, on) in zip(names, places, strict=True))
    cluster = Cluster(
        directory=request.directory,
        user=user_name() or "",
        controller_host=host,
        controller_address=address,
        controller_port=port,
        node_host=None if request.isolated else host,
        nodes=nodes,
        cpus_per_node=request.cpus_per_node,
        gpus_per_node=request.gpus_per_node,
        overrides=request.overrides,
    )
    sandbox = Sandbox(
        directory=request.directory,
        token=token,
        isolated=request.isolated,
        interface=network.interface_name(token) if request.isolated else None,
        controller_host=host,
        nodes=names,
        partitions=PARTITIONS,
        uses_cgroups=request.uses_cgroups,
    )
    return sandbox, cluster


def write_files(sandbox: Sandbox, cluster: Cluster) -> None:
    """Write the files that the daemons read, and make the directories that they write to.

    Args:
        sandbox: the sandbox; its directory exists.
        cluster: its configuration.
    """
    for directory in daemons.directories_of(cluster):
        directory.mkdir(parents=True)
    key = daemons.key_of(cluster)
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(_MUNGE_KEY_BYTES))
    for node in cluster.nodes:
        for index in range(cluster.gpus_per_node):
            # Slurm requires a character device; no process opens it.
            cluster.device_of(node.name, index).symlink_to("/dev/null")
    for path in network.namespace_files(cluster) if cluster.node_host is None else ():
        path.parent.mkdir(exist_ok=True)
        path.touch()
    write_text(cluster.directory / "hosts", configuration.hosts_file(cluster))
    write_text(cluster.directory / "gres.conf", configuration.gres_conf(cluster))
    write_text(cluster.slurm_conf, configuration.slurm_conf(cluster))
    if sandbox.uses_cgroups:
        write_text(cluster.directory / "cgroup.conf", cgroups.configuration(cluster.directory))


def write_srun_configuration(cluster: Cluster) -> None:
    """Let srun listen on all addresses where the tasks cannot reach it at the daemons' address.

    Tasks connect to the source address of srun's own connection: for a connection to 127.0.1.1 that is 127.0.0.1.

    Args:
        cluster: a running one; its daemons have read slurm.conf and do not read it again.
    """
    if cluster.node_host is not None and not start.is_source_address(cluster.controller_address):
        write_text(cluster.slurm_conf, configuration.slurm_conf(cluster, binds_srun=False))
