"""Where the ranks of one attempt meet: rank 0 binds a port and publishes it, the others find and try it.

The port is bound by the process that will serve it and stays bound, so there is no moment in which another job on the
node could take it. It is published in the attempt's own directory under the attempt's token, so a rank of an earlier
attempt, or a stranger, finds nothing to join.
"""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar, TypeVar

from hpcddp.errors import HpcddpError
from hpcddp.launch import network
from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.files import read_json, write_json
from hpcddp.slurm.rank_env import RankEnv
from hpcddp.stop.exit_codes import ExitCode

PORTS = range(20000, 32768)
"""Below the kernel's ephemeral ports (from 32768), above what services use."""

_POLL_S = 0.05
_CONNECT_TIMEOUT_S = 3.0


T = TypeVar("T")


class RendezvousError(HpcddpError):
    """The ranks did not all meet."""

    kind = "rendezvous"
    exit_code: ClassVar[int] = ExitCode.INFRASTRUCTURE


class PeerFailedError(RendezvousError):
    """Another rank has failed already; this one only follows."""

    kind = "peer_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where to meet.

    Args:
        address: rank 0's host, as this rank reaches it; becomes MASTER_ADDR.
        port: the port that rank 0 listens on; becomes MASTER_PORT.
        token: what this attempt's keys in the store begin with.
        interface: the network interface of this host that leads there, or None if that cannot be told.
        listener: rank 0's listening socket; None on the other ranks.
    """

    address: str
    port: int
    token: str
    interface: str | None
    listener: socket.socket | None


def meet(env: RankEnv, attempt: AttemptDirectory, *, own_host: str, timeout: timedelta) -> Rendezvous:
    """Publish (rank 0) or find (the others) the place where the ranks of this attempt meet.

    Args:
        env: who this rank is.
        attempt: the attempt's directory, which every host sees.
        own_host: this host's name.
        timeout: how long to wait for rank 0.

    Raises:
        RendezvousError: rank 0 did not appear in time, or cannot be reached from here, or another rank has failed.
    """
    token = str(read_json(attempt.start)["token"])
    if env.rank == 0:
        return _publish(env, attempt, own_host=own_host, token=token)
    return _find(env, attempt, own_host=own_host, token=token, deadline=time.monotonic() + timeout.total_seconds())


def raise_if_a_rank_failed(attempt: AttemptDirectory) -> None:
    """Stop waiting for a rank that is known to have failed.

    Raises:
        PeerFailedError: an error record of this attempt exists; it is named.
    """
    for record in sorted(attempt.path.glob("error-rank-*.json")):
        error = read_json(record)
        if error is not None:
            raise PeerFailedError(
                f"rank {error['rank']} on {error['host']} failed before all ranks had met: {error['message']}",
                hint=f"Its log is {attempt.rank_log(error['rank'])}.",
            )


def bind_port(token: str) -> socket.socket:
    """Return a socket that listens on a free port of ``PORTS``.

    Args:
        token: the search begins at a port that follows from it, so that two jobs rarely try the same one.

    Raises:
        RendezvousError: no port of the range is free.
    """
    first = int.from_bytes(hashlib.sha256(token.encode()).digest()[:4], "big")
    for attempt in range(len(PORTS)):
        port = PORTS[(first + attempt) % len(PORTS)]
        try:
            return _listen(port)
        except OSError:
            continue
    raise RendezvousError(f"no port of {PORTS.start}-{PORTS.stop - 1} is free on {socket.gethostname()}")


def _listen(port: int) -> socket.socket:
    dual_stack = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual_stack else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=4096, dualstack_ipv6=dual_stack)


def _publish(env: RankEnv, attempt: AttemptDirectory, *, own_host: str, token: str) -> Rendezvous:
    peers = [host for host in env.hosts if host != env.host_of(0)]
    addresses = network.reachable_addresses([own_host, *env.hosts[:1]], peers, single_host=env.nodes == 1)
    if not addresses:
        raise RendezvousError(
            f"{own_host} has no address that another host could reach: only loopback and link-local ones were found"
        )
    listener = bind_port(token)
    port = int(listener.getsockname()[1])
    write_json(attempt.rendezvous, {"host": own_host, "addresses": addresses, "port": port, "token": token})
    interface = network.interface_of(addresses[0])
    return Rendezvous(address=addresses[0], port=port, token=token, interface=interface, listener=listener)


def _find(env: RankEnv, attempt: AttemptDirectory, *, own_host: str, token: str, deadline: float) -> Rendezvous:
    published = _wait_for(lambda: read_json(attempt.rendezvous), attempt, deadline)
    if published is None:
        host = env.host_of(0) or (own_host if env.nodes == 1 else "the first host")
        raise RendezvousError(f"rank 0 on {host} did not appear within the rendezvous timeout (seen from {own_host})")
    addresses, port = [str(address) for address in published["addresses"]], int(published["port"])
    reached = _wait_for(lambda: _first_reachable(addresses, port), attempt, deadline)
    if reached is None:
        raise RendezvousError(
            f"rank {env.rank} on {own_host} cannot reach rank 0 on {published['host']} at {', '.join(addresses)} "
            f"port {port}; let the hosts of a job reach each other on ports {PORTS.start}-{PORTS.stop - 1}"
        )
    address, own_address = reached
    interface = network.interface_of(own_address)
    return Rendezvous(address=address, port=port, token=token, interface=interface, listener=None)


def _wait_for(look: Callable[[], T | None], attempt: AttemptDirectory, deadline: float) -> T | None:
    """Return what ``look`` finds, or None at the deadline."""
    while (found := look()) is None:
        raise_if_a_rank_failed(attempt)
        if time.monotonic() > deadline:
            return None
        time.sleep(_POLL_S)
    return found


def _first_reachable(addresses: list[str], port: int) -> tuple[str, str] | None:
    """Return (address, this host's address on the way there) for the first address that answers."""
    for address in addresses:
        try:
            with socket.create_connection((address, port), timeout=_CONNECT_TIMEOUT_S) as connection:
                return address, str(connection.getsockname()[0]).removeprefix("::ffff:")
        except OSError:
            continue
    return None
