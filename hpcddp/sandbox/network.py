"""The network of a sandbox: free addresses and ports, and the commands that create hosts of its own."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Iterator, Mapping
from ipaddress import IPv4Network
from pathlib import Path

from hpcddp.errors import HpcddpError, UserError
from hpcddp.sandbox.configuration import Cluster, Node
from hpcddp.sandbox.programs import Command, ProcessError, run

# Reserved for tests of network devices (RFC 2544, RFC 6890): no site routes it.
_RANGE = IPv4Network("198.18.0.0/15")
_PREFIX = 24
_CONTROLLER_OFFSET = 1
_FIRST_NODE_OFFSET = 11
_MACHINE_OFFSET = 254
MOST_NODES = _MACHINE_OFFSET - _FIRST_NODE_OFFSET

CONTROLLER_HOST = "ctl"
CONTROLLER_PORT = 6817
NODE_PORT = 6818
_BRIDGE = "br0"
# The sandbox's end of the veth pair to this machine.
UPLINK = "machine0"

# Below the ephemeral ports (32768-60999), so that a free one stays free.
_PORTS = range(10_000, 20_000)


class NetworkError(HpcddpError):
    """No part of the address range is free."""

    kind = "network"


def free_subnet(taken: Iterable[IPv4Network], start: int) -> IPv4Network:
    """Return a /24 that overlaps none of the networks in use.

    Args:
        taken: networks that this machine has an address in or a route to, without the default route.
        start: where to begin the search, any number, so that sandboxes begin at different places.

    Raises:
        NetworkError: every candidate is taken.
    """
    used = tuple(taken)
    candidates = list(_RANGE.subnets(new_prefix=_PREFIX))
    first = start % len(candidates)
    for candidate in candidates[first:] + candidates[:first]:
        if not any(candidate.overlaps(network) for network in used):
            return candidate
    raise NetworkError(
        f"every /{_PREFIX} in {_RANGE} is in use on this machine, and each sandbox with hosts of its own needs one; "
        "end another sandbox, or use --hosts shared"
    )


def controller_address(subnet: IPv4Network) -> str:
    """Return the address of slurmctld in ``subnet``."""
    return str(subnet[_CONTROLLER_OFFSET])


def node_addresses(subnet: IPv4Network, count: int) -> list[str]:
    """Return the addresses of ``count`` nodes, at most ``MOST_NODES``."""
    return [str(subnet[_FIRST_NODE_OFFSET + index]) for index in range(count)]


def machine_address(controller: str) -> str:
    """Return this machine's own address in the controller's network."""
    return str(IPv4Network(f"{controller}/{_PREFIX}", strict=False)[_MACHINE_OFFSET])


def interface_name(token: str) -> str:
    """Return the name of this machine's end of the veth pair: at most 15 characters (IFNAMSIZ)."""
    return f"hpcddp{token[:8]}"


def parse_networks(texts: Iterable[str]) -> Iterator[IPv4Network]:
    """Yield the IPv4 networks among what ``ip route`` and ``ip address`` list; the default route is not a network."""
    for text in texts:
        try:
            yield IPv4Network(text, strict=False)
        except ValueError:
            continue


def namespace_file(directory: Path, kind: str, node: str) -> Path:
    """Return the file that keeps a node's namespace alive; ``kind`` is ``net`` or ``uts``."""
    return directory / kind / node


def namespace_files(cluster: Cluster) -> tuple[Path, ...]:
    """Return the files that must be there before ``build_commands`` are run."""
    return tuple(
        namespace_file(cluster.directory, kind, node.name) for node in cluster.nodes for kind in ("net", "uts")
    )


def on_node(directory: Path, node: str) -> tuple[str, ...]:
    """Return the prefix of a command that runs it on a node, for use by the daemon manager."""
    net, uts = (namespace_file(directory, kind, node) for kind in ("net", "uts"))
    return ("nsenter", f"--net={net}", f"--uts={uts}", "--")


def build_commands(cluster: Cluster) -> tuple[Command, ...]:
    """Return the commands, run by the daemon manager in its own namespaces, that build the hosts.

    A bridge joins the nodes, slurmctld and this machine. Each node gets a network and a host name of its own.
    """
    lines = [
        "link set lo up",
        f"link add {_BRIDGE} type bridge",
        f"address add {cluster.controller_address}/{_PREFIX} dev {_BRIDGE}",
        f"link set {_BRIDGE} up",
        f"link set {UPLINK} master {_BRIDGE} up",
    ]
    commands = [
        Command(argv=("mount", "--bind", str(cluster.directory / "hosts"), "/etc/hosts")),
        Command(argv=("ip", "-batch", "-"), standard_input=_lines(lines)),
    ]
    for number, node in enumerate(cluster.nodes, start=1):
        commands += _node_commands(cluster.directory, node, interface=f"cable{number}")
    return tuple(commands)


def _node_commands(directory: Path, node: Node, *, interface: str) -> list[Command]:
    net, uts = (namespace_file(directory, kind, node.name) for kind in ("net", "uts"))
    ends = [
        f"link add {interface} type veth peer name eth0 netns {net}",
        f"link set {interface} master {_BRIDGE} up",
    ]
    inside = ["link set lo up", f"address add {node.address}/{_PREFIX} dev eth0", "link set eth0 up"]
    return [
        Command(argv=("unshare", f"--net={net}", f"--uts={uts}", "hostname", node.name)),
        Command(argv=("ip", "-batch", "-"), standard_input=_lines(ends)),
        Command(argv=(*on_node(directory, node.name), "ip", "-batch", "-"), standard_input=_lines(inside)),
    ]


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def networks_in_use(environment: Mapping[str, str]) -> list[IPv4Network]:
    """Return the IPv4 networks that this machine has a route to, in whatever routing table."""
    printed = run(Command(argv=("ip", "-json", "-4", "route", "show", "table", "all")), environment)
    return list(parse_networks(route.get("dst", "") for route in json.loads(printed)))


def host_address() -> str:
    """Return the address of this host's name, on which Slurm's processes listen unless they listen on all addresses.

    Raises:
        UserError: the name has none, or that of another host.
    """
    name = socket.gethostname()
    try:
        address = str(socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except socket.gaierror:
        raise _name_error(name, "has no IPv4 address") from None
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            raise _name_error(name, f"has the address {address}, which is not this host's") from None
    return address


def _name_error(name: str, what: str) -> UserError:
    return UserError(
        f"this host is called {name!r}, and that name {what}; Slurm's daemons listen there: "
        "put 127.0.0.1 and the name into /etc/hosts, or use --hosts namespaces as root"
    )


def is_source_address(address: str) -> bool:
    """Return whether what this host sends to one of its own addresses comes from the same address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Sends nothing, the kernel only chooses the source (udp(7)); any port does.
        probe.connect((address, 9))
        return bool(probe.getsockname()[0] == address)


def free_ports(count: int, *, start: int) -> list[int]:
    """Return ports on which no process listens, at any address of this host.

    Args:
        start: where to begin the search, any number, so that sandboxes begin at different places.

    Raises:
        ProcessError: there are not that many.
    """
    ports: list[int] = []
    for offset in range(len(_PORTS)):
        port = _PORTS[(start + offset) % len(_PORTS)]
        if _is_free(port):
            ports.append(port)
        if len(ports) == count:
            return ports
    raise ProcessError(f"fewer than {count} ports from {_PORTS.start} to {_PORTS.stop - 1} are free on this machine")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def connect_machine(interface: str, address: str, *, manager: int, environment: Mapping[str, str]) -> None:
    """Create a veth pair between this machine and the sandbox; the kernel removes it with the sandbox's network.

    Args:
        interface: the name of this machine's end.
        address: this machine's address in the sandbox's network.
        manager: the daemon manager's process id.
        environment: the environment of the commands.
    """
    lines = (
        f"link add {interface} type veth peer name {UPLINK} netns {manager}\n"
        f"address add {address}/{_PREFIX} dev {interface}\n"
        f"link set {interface} up\n"
    )
    run(Command(argv=("ip", "-batch", "-"), standard_input=lines), environment)
