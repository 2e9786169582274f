"""Addresses of this host that other hosts can reach, and their network interfaces."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

# linux/sockios.h
_SIOCGIFADDR = 0x8915
# Any port will do: connecting a datagram socket sends nothing, it only asks the kernel for the route.
_DISCARD_PORT = 9


def reachable_addresses(own_names: Iterable[str], peers: Iterable[str], *, single_host: bool) -> list[str]:
    """Return the addresses of this host by which its peers may reach it, the most likely first.

    The address on the route to a peer comes first: the kernel itself would use it. The addresses of this host's names
    follow, without loopback addresses (Debian writes ``127.0.1.1 HOST`` into ``/etc/hosts``), then the addresses of the
    interfaces.

    Args:
        own_names: names of this host, such as its Slurm node name.
        peers: names or addresses of other hosts of the job, as far as they are known.
        single_host: whether the job has this host only; the address is then loopback.
    """
    if single_host:
        return ["127.0.0.1"]
    found = [
        route
        for peer in islice(peers, 4)
        for address in resolve(peer)
        if (route := source_address(address)) is not None
    ]
    found += [address for name in own_names for address in resolve(name)]
    found += [address for _, address in interface_addresses()]
    return [address for address in dict.fromkeys(found) if not is_local_only(address)]


def resolve(name: str) -> list[str]:
    """Return the addresses of ``name`` as this host resolves it; empty if it cannot."""
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(answer[4][0]) for answer in answers))


def is_local_only(address: str) -> bool:
    """Return whether other hosts cannot use ``address`` to reach this host."""
    parsed = ipaddress.ip_address(address.split("%", 1)[0])
    return parsed.is_loopback or parsed.is_link_local or parsed.is_unspecified


def source_address(destination: str) -> str | None:
    """Return this host's address on the route to ``destination`` (an address), or None without a route."""
    family = socket.AF_INET6 if ":" in destination else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((destination, _DISCARD_PORT))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has ``address``, or None if no interface is known to have it."""
    return next((name for name, held in interface_addresses() if held == address), None)


def interface_addresses() -> Iterator[tuple[str, str]]:
    """Yield (interface, address) for every interface of this host: its first IPv4 address, then its IPv6 addresses."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            # netdevice(7): the request is the interface's name in 16 bytes, the answer a sockaddr_in behind it.
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                yield name, socket.inet_ntoa(answer[20:24])
    yield from _ipv6_addresses(Path("/proc/net/if_inet6"))


def _ipv6_addresses(table: Path) -> Iterator[tuple[str, str]]:
    """Yield (interface, address) from the kernel's table: address, index, prefix length, scope, flags, name."""
    with contextlib.suppress(FileNotFoundError):
        for line in table.read_text(encoding="ascii").splitlines():
            digits, *_, name = line.split()
            yield name, str(ipaddress.IPv6Address(bytes.fromhex(digits)))
