"""From what a user asks for to names, addresses, ports and files that are free on this machine."""

from __future__ import annotations

import secrets
import socket

from hpcddp.rehearse import cgroups, configuration, daemons, network, processes
from hpcddp.rehearse.configuration import PARTITIONS, Cluster, Node
from hpcddp.rehearse.request import Request, user_name
from hpcddp.rehearse.state import Sandbox
from hpcddp.run.files import write_text

_MUNGE_KEY_BYTES = 128


def plan(request: Request, token: str) -> tuple[Sandbox, Cluster]:
    """Decide every name, address and port.

    Args:
        request: what the user wants.
        token: the new sandbox's token, in hexadecimal.
    """
    names = tuple(f"n{number}" for number in range(1, request.nodes + 1))
    # Sandboxes look for what is free from different places on.
    start = int(token, 16)
    if request.isolated:
        subnet = network.free_subnet(processes.networks_in_use(processes.daemon_environment(token)), start)
        host, address, port = network.CONTROLLER_HOST, network.controller_address(subnet), network.CONTROLLER_PORT
        places = [(one, network.NODE_PORT) for one in network.node_addresses(subnet, len(names))]
    else:
        host, address = socket.gethostname().partition(".")[0], "127.0.0.1"
        port, *ports = processes.free_ports(1 + len(names), start=start)
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
    """Write everything that the daemons read, and make the directories that they write to.

    Args:
        sandbox: the sandbox; its directory is there.
        cluster: what it is to be.
    """
    for directory in daemons.directories_of(cluster):
        directory.mkdir(parents=True)
    key = daemons.key_of(cluster)
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(_MUNGE_KEY_BYTES))
    for node in cluster.nodes:
        for index in range(cluster.gpus_per_node):
            # Slurm wants a character device; nobody opens it.
            cluster.device_of(node.name, index).symlink_to("/dev/null")
    for path in network.namespace_files(cluster) if cluster.node_host is None else ():
        path.parent.mkdir(exist_ok=True)
        path.touch()
    write_text(cluster.directory / "hosts", configuration.hosts_file(cluster))
    write_text(cluster.directory / "gres.conf", configuration.gres_conf(cluster))
    write_text(cluster.slurm_conf, configuration.slurm_conf(cluster))
    if sandbox.uses_cgroups:
        write_text(cluster.directory / "cgroup.conf", cgroups.configuration(cluster.directory))
