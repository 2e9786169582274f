"""Rendezvous of the ranks of one attempt: rank 0 binds a port and publishes it, the other ranks read and try it.

The process that serves the port binds it and keeps it bound, so no other job on the node can take it in between. It is
published in the attempt's own directory with the attempt's token, so a rank of an earlier attempt, or another program,
cannot join. The second part of the file finds the addresses of this host that other hosts can reach, and their network
interfaces.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import ipaddress
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import ClassVar, TypeVar

from hpcddp.errors import HpcddpError
from hpcddp.polling import wait_until
from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.failure import FailureRecord
from hpcddp.run.job_records import (
    PublishedAddress,
    Rank,
    publish_address,
    read_address,
    read_start,
    report_rank,
    reported_ranks,
    write_ranks,
)
from hpcddp.run.record import read_record
from hpcddp.slurm.rank_env import RankEnv
from hpcddp.stop.reasons import ExitCode

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


PORTS = range(20000, 32768)
"""Below the kernel's ephemeral ports (from 32768), above what services use."""
_POLL_S = 0.05
_CONNECT_TIMEOUT_S = 3.0
_MOST_RANKS_NAMED = 8
T = TypeVar("T")


class RendezvousError(HpcddpError):
    """Not all ranks met."""

    kind = "rendezvous"
    exit_code: ClassVar[int] = ExitCode.INFRASTRUCTURE


class PeerFailedError(RendezvousError):
    """Another rank has failed, and this rank ends because of it."""

    kind = "peer_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """The address at which the ranks of an attempt meet.

    Args:
        address: rank 0's host, as this rank reaches it; becomes MASTER_ADDR.
        port: the port that rank 0 listens on; becomes MASTER_PORT.
        token: the prefix of this attempt's keys in the store.
        interface: the network interface of this host that leads to rank 0; None if it is not known.
        listener: rank 0's listening socket; None on the other ranks.
    """

    address: str
    port: int
    token: str
    interface: str | None
    listener: socket.socket | None


def meet(env: RankEnv, attempt: AttemptDirectory, *, own_host: str, timeout: timedelta) -> Rendezvous:
    """Publish (rank 0) or read (the other ranks) the address at which the ranks of this attempt meet.

    Args:
        env: this rank.
        attempt: the attempt's directory, which every host sees.
        own_host: this host's name.
        timeout: how long to wait for rank 0.

    Raises:
        RendezvousError: rank 0 did not appear in time, or cannot be reached from here, or another rank has failed.
    """
    start = read_start(attempt)
    if start is None:
        raise RendezvousError(f"{attempt.start} is not there; every host must see the run directory")
    token = start.token
    if env.rank == 0:
        return _publish(env, attempt, own_host=own_host, token=token)
    return _find(env, attempt, own_host=own_host, token=token, deadline=time.monotonic() + timeout.total_seconds())


def raise_if_a_rank_failed(attempt: AttemptDirectory) -> None:
    """Raise if a rank of this attempt has written a failure record.

    Raises:
        PeerFailedError: a rank has failed; the message names it.
    """
    for record in sorted(attempt.path.glob("error-rank-*.json")):
        error = read_record(record, FailureRecord)
        if error is not None:
            raise PeerFailedError(
                f"rank {error.rank} on {error.host} failed before all ranks had met: {error.message}",
                hint=f"Its log is {attempt.rank_log(error.rank)}.",
            )


def bind_port(token: str, *, single_host: bool = False) -> socket.socket:
    """Return a socket that listens on a free port of ``PORTS``.

    Args:
        token: determines the first port that is tried, so that two jobs rarely try the same one.
        single_host: whether only this host needs it; other hosts then cannot connect to it.

    Raises:
        RendezvousError: no port of the range is free.
    """
    first = int.from_bytes(hashlib.sha256(token.encode()).digest()[:4], "big")
    for attempt in range(len(PORTS)):
        port = PORTS[(first + attempt) % len(PORTS)]
        try:
            return _listen(port, loopback=single_host)
        except OSError:
            continue
    raise RendezvousError(f"no port of {PORTS.start}-{PORTS.stop - 1} is free on {socket.gethostname()}")


def _listen(port: int, *, loopback: bool) -> socket.socket:
    if loopback:
        return socket.create_server(("127.0.0.1", port), backlog=4096)
    dual_stack = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual_stack else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=4096, dualstack_ipv6=dual_stack)


def _publish(env: RankEnv, attempt: AttemptDirectory, *, own_host: str, token: str) -> Rendezvous:
    peers = [host for host in env.hosts if host != env.host_of(0)]
    addresses = reachable_addresses([own_host, *env.hosts[:1]], peers, single_host=env.nodes == 1)
    if not addresses:
        raise RendezvousError(
            f"{own_host} has no address that another host could reach: only loopback and link-local ones were found"
        )
    listener = bind_port(token, single_host=env.nodes == 1)
    port = int(listener.getsockname()[1])
    published = PublishedAddress(host=own_host, addresses=tuple(addresses), port=port, token=token)
    publish_address(attempt, published)
    interface = interface_of(addresses[0])
    return Rendezvous(address=addresses[0], port=port, token=token, interface=interface, listener=listener)


def _find(env: RankEnv, attempt: AttemptDirectory, *, own_host: str, token: str, deadline: float) -> Rendezvous:
    published = _wait_for(lambda: read_address(attempt), attempt, deadline)
    if published is None:
        host = env.host_of(0) or (own_host if env.nodes == 1 else "the first host")
        raise RendezvousError(f"rank 0 on {host} did not appear within the rendezvous timeout (seen from {own_host})")
    port = published.port
    reached = _wait_for(lambda: _first_reachable(published.addresses, port), attempt, deadline)
    if reached is None:
        raise RendezvousError(
            f"rank {env.rank} on {own_host} cannot reach rank 0 on {published.host} at "
            f"{', '.join(published.addresses)} port {port}; let the hosts of a job reach each other on ports "
            f"{PORTS.start}-{PORTS.stop - 1}"
        )
    address, own_address = reached
    interface = interface_of(own_address)
    return Rendezvous(address=address, port=port, token=token, interface=interface, listener=None)


def _wait_for(look: Callable[[], T], attempt: AttemptDirectory, deadline: float) -> T:
    """Return the first true value of ``look``, or the last other one at the deadline.

    Raises:
        PeerFailedError: a rank has failed meanwhile.
    """

    def look_at_the_others_too() -> T:
        if not (found := look()):
            raise_if_a_rank_failed(attempt)
        return found

    return wait_until(look_at_the_others_too, timeout_s=deadline - time.monotonic(), poll_s=_POLL_S)


def _first_reachable(addresses: Sequence[str], port: int) -> tuple[str, str] | None:
    """Return (address, this host's address on the route to it) for the first address that accepts a connection."""
    for address in addresses:
        try:
            with socket.create_connection((address, port), timeout=_CONNECT_TIMEOUT_S) as connection:
                return address, str(connection.getsockname()[0]).removeprefix("::ffff:")
        except OSError:
            continue
    return None


def announce_rank(env: RankEnv, attempt: AttemptDirectory, *, host: str, launcher: str | None = None) -> None:
    """Record that this rank runs, or this task of a launcher, and on which host."""
    report_rank(attempt, env.rank, Rank(host=host, launcher=launcher))


def wait_for_ranks(env: RankEnv, attempt: AttemptDirectory, *, timeout: timedelta) -> None:
    """Wait on rank 0 until every rank is announced, and record the host of each.

    Raises:
        RendezvousError: a rank was not announced in time, and the message names it with its host; or a rank has failed.
    """
    deadline = time.monotonic() + timeout.total_seconds()

    missing = list(range(env.world_size))

    def all_are_announced() -> bool:
        missing[:] = [rank for rank in missing if not attempt.rank_here(rank).exists()]
        return not missing

    if not _wait_for(all_are_announced, attempt, deadline):
        raise RendezvousError(f"{_places(env, missing)} did not appear within the rendezvous timeout")
    write_ranks(attempt, reported_ranks(attempt, env.world_size))


def _places(env: RankEnv, ranks: list[int]) -> str:
    named = ", ".join(f"{rank} on {env.host_of(rank) or 'its host'}" for rank in ranks[:_MOST_RANKS_NAMED])
    more = f" and {len(ranks) - _MOST_RANKS_NAMED} more" if len(ranks) > _MOST_RANKS_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {named}{more}"
