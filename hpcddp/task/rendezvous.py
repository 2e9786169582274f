"""Rendezvous of the ranks of one attempt: they connect to rank 0, send who they are, and get one reply.

Rank 0 publishes its address in the attempt's own directory. The messages are those of ``exchange``. The process that
serves a port binds it and keeps it bound, so no other job on the node can take it in between. The first part of the
file finds the addresses of this host that other hosts can reach, and their network interfaces.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import json
import secrets
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Final, TypeVar

from hpcddp.errors import HpcddpError
from hpcddp.processes import wait_until
from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.failure import exits_of_tasks
from hpcddp.run.job_records import Binding, FailureRecord, PublishedAddress, publish_address, read_address, read_start
from hpcddp.run.record import read_record
from hpcddp.slurm.rank_env import RankEnv
from hpcddp.stop.reasons import ExitCode
from hpcddp.task.exchange import ExchangeClient, ExchangeError, ExchangeServer

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
    addresses = []
    for peer in islice(peers, 4):
        routes = [source_address(address) for address in resolve(peer)]
        addresses += [route for route in routes if route is not None]
    for name in own_names:
        addresses += resolve(name)
    addresses += [address for _, address in interface_addresses()]
    return [address for address in dict.fromkeys(addresses) if not is_local_only(address)]


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
_POLL_S: Final = 0.05
# How often all waiting ranks together look for the address of rank 0: each look is some operations of a file server,
# for the address, failure records and the batch log.
_LOOKS_PER_S: Final = 5000
# How much longer the other ranks wait for rank 0's reply: it may have started later than they have.
_REPLY_GRACE_S: Final = 30.0
# How long a rank whose connection to rank 0 has ended waits for the record that says why.
_RECORD_TIMEOUT_S: Final = 5.0
_MOST_RANKS_NAMED: Final = 16
_LONGEST_REASON: Final = 2000
T = TypeVar("T")


class RendezvousError(HpcddpError):
    """Not all ranks met."""

    kind = "rendezvous"
    exit_code: ClassVar[int] = ExitCode.INFRASTRUCTURE


class MissingRankError(RendezvousError):
    """Some ranks did not start within the rendezvous timeout."""

    kind = "missing_rank"


class PeerFailedError(RendezvousError):
    """Another rank has failed, and this rank ends because of it."""

    kind = "peer_failed"


class DisagreementError(HpcddpError):
    """The ranks differ in version, job file or attempt, or two of them share a GPU."""

    kind = "disagreement"
    exit_code: ClassVar[int] = ExitCode.USER_CODE


_ERRORS: Final[Mapping[str, type[HpcddpError]]] = MappingProxyType(
    {kind.kind: kind for kind in (RendezvousError, MissingRankError, PeerFailedError, DisagreementError)}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a rank sends to rank 0 about itself.

    Args:
        gpu: UUID of its GPU; None on a CPU, and for a command.
        binding: to what srun has bound it; None if to nothing.
        must_agree: what must be the same on all ranks, by its name in a message.
    """

    host: str
    gpu: str | None = None
    binding: Binding | None = None
    must_agree: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """The address at which the ranks of an attempt open their process group.

    Args:
        address: rank 0's host, as this rank reaches it; becomes MASTER_ADDR.
        port: a port that rank 0 holds; becomes MASTER_PORT.
        interface: the network interface of this host that leads to rank 0; None if it is not known.
        listener: rank 0's socket that listens on the port; None on the other ranks.
        identities: those of all ranks, on rank 0; empty on the other ranks.
    """

    address: str
    port: int
    interface: str | None
    listener: socket.socket | None
    identities: tuple[Identity, ...] = ()


def meet(env: RankEnv, attempt: AttemptDirectory, identity: Identity, *, timeout: timedelta) -> Rendezvous:
    """Wait until all ranks of this attempt are there and agree.

    Rank 0 publishes the address of the exchange in the attempt's directory. The port in the result is another one,
    which only the ranks are told.

    Args:
        attempt: the attempt's directory, which every host sees.
        identity: what this rank sends to rank 0 about itself.
        timeout: how long to wait for the other ranks.

    Raises:
        RendezvousError: a rank did not appear in time, cannot reach rank 0, or has failed.
        DisagreementError: the ranks differ.
    """
    start = read_start(attempt)
    if start is None:
        raise RendezvousError(f"{attempt.start} is not there; every host must see the run directory")
    if not start.token:
        raise RendezvousError(f"{attempt.start} has no token by which ranks could meet; submit the job again")
    key = start.token.encode()
    if env.rank == 0:
        return _meet_as_rank_0(env, attempt, identity, key=key, timeout=timeout)
    return _meet_rank_0(env, attempt, identity, key=key, timeout=timeout)


def raise_if_a_rank_failed(attempt: AttemptDirectory) -> None:
    """Raise if a rank of this attempt has written a failure record, or has ended, as srun says.

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
    # Of a rank that was killed there is no record, and srun kills the others only after KillWait.
    exits = exits_of_tasks(attempt)
    if exits:
        rank = min(exits)
        raise PeerFailedError(
            f"rank {rank} ended before all ranks had met: {exits[rank]}", hint=f"Its log is {attempt.rank_log(rank)}."
        )


def bind_port(*, single_host: bool = False) -> socket.socket:
    """Return a socket that listens on a free port of ``PORTS``.

    Args:
        single_host: whether only this host needs it; other hosts then cannot connect to it.

    Raises:
        RendezvousError: no port of the range is free.
    """
    # Two jobs rarely try the same port first.
    first = secrets.randbelow(len(PORTS))
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


def _meet_as_rank_0(
    env: RankEnv, attempt: AttemptDirectory, identity: Identity, *, key: bytes, timeout: timedelta
) -> Rendezvous:
    deadline = time.monotonic() + timeout.total_seconds()
    single_host = env.nodes == 1
    other_hosts = [host for host in env.hosts if host != env.host_of(0)]
    addresses = reachable_addresses([identity.host, *env.hosts[:1]], other_hosts, single_host=single_host)
    if not addresses:
        raise RendezvousError(
            f"{identity.host} has no address that another host could reach: only loopback and link-local ones were "
            "found"
        )

    def rank_of(hello: bytes) -> int:
        rank, _ = _parse_hello(hello, env)
        return rank

    with (
        bind_port(single_host=single_host) as exchange_socket,
        ExchangeServer(exchange_socket, key, expected=env.world_size - 1, rank_of=rank_of) as server,
    ):
        exchange_port = int(exchange_socket.getsockname()[1])
        publish_address(attempt, PublishedAddress(host=identity.host, addresses=tuple(addresses), port=exchange_port))
        try:
            identities = {0: identity}
            for hello in _gather(server, env, attempt, deadline=deadline).values():
                rank, identity_of_rank = _parse_hello(hello, env)
                identities[rank] = identity_of_rank
            _refuse(env, identities, timeout)
            listener = bind_port(single_host=single_host)
        except (RendezvousError, DisagreementError) as error:
            server.send_reply(json.dumps({"kind": error.kind, "message": error.message[:_LONGEST_REASON]}).encode())
            raise
        port = int(listener.getsockname()[1])
        server.send_reply(json.dumps({"port": port}).encode())
    return Rendezvous(
        address=addresses[0],
        port=port,
        interface=interface_of(addresses[0]),
        listener=listener,
        identities=tuple(identities[rank] for rank in range(env.world_size)),
    )


def _parse_hello(hello: bytes, env: RankEnv) -> tuple[int, Identity]:
    """Return the rank in a hello, and its identity.

    Raises:
        ValueError: it is not one of the other ranks of this job.
    """
    try:
        document = json.loads(hello)
        rank = document["rank"]
        binding = document["identity"].pop("binding")
        identity = Identity(**document["identity"], binding=binding and Binding(**binding))
    except (KeyError, TypeError) as error:
        raise ValueError("it is of another version of hpcddp") from error
    if rank not in range(1, env.world_size):
        raise ValueError(f"there is no other rank {rank}")
    return rank, identity


def _gather(server: ExchangeServer, env: RankEnv, attempt: AttemptDirectory, *, deadline: float) -> Mapping[int, bytes]:
    try:
        return server.gather(deadline=deadline, watch=lambda: raise_if_a_rank_failed(attempt))
    except OSError as error:
        if error.errno not in {errno.EMFILE, errno.ENFILE}:
            raise
        raise RendezvousError(
            f"rank 0 cannot open a connection to each of {env.world_size - 1} ranks ({error.strerror}); raise the "
            "limit of open files on its host (ulimit -n)"
        ) from error


def _refuse(env: RankEnv, identities: Mapping[int, Identity], timeout: timedelta) -> None:
    """Refuse a world that is not complete, or not of one kind."""
    missing = [rank for rank in range(env.world_size) if rank not in identities]
    if missing:
        raise MissingRankError(missing_sentence(env, missing, timeout))
    ordered = [identities[rank] for rank in range(env.world_size)]
    sentence = disagreement_sentence(ordered) or shared_gpu_sentence(ordered)
    if sentence is not None:
        raise DisagreementError(sentence)


def missing_sentence(env: RankEnv, missing: Sequence[int], timeout: timedelta) -> str:
    """Return the error that names the ranks in ``missing`` and their hosts."""
    # If the launcher gives no host names, a job of one node runs on this host.
    unnamed_host = socket.gethostname() if env.nodes == 1 else "an unknown host"
    named = ", ".join(f"rank {rank} on {env.host_of(rank) or unnamed_host}" for rank in missing[:_MOST_RANKS_NAMED])
    if len(missing) > _MOST_RANKS_NAMED:
        named = f"{named} and {len(missing) - _MOST_RANKS_NAMED} more"
    return (
        f"{len(missing)} of {env.world_size} ranks did not start within the rendezvous timeout of "
        f"{timeout.total_seconds():.0f} s: {named}; look at those hosts, or raise launch.rendezvous_timeout"
    )


def disagreement_sentence(identities: Sequence[Identity]) -> str | None:
    """Return the error that names the first rank that differs from the majority, or None if all agree."""
    for name in identities[0].must_agree:
        values = [identity.must_agree.get(name) for identity in identities]
        most_common_value = Counter(values).most_common(1)[0][0]
        for rank, value in enumerate(values):
            if value != most_common_value:
                return (
                    f"rank {rank} on {identities[rank].host} has {name} {value}, the other ranks have "
                    f"{most_common_value}; every host must see the same environment and the same run directory"
                )
    return None


def shared_gpu_sentence(identities: Sequence[Identity]) -> str | None:
    """Return the error that names two ranks on one GPU, or None."""
    seen: dict[str, int] = {}
    for rank, identity in enumerate(identities):
        if identity.gpu is None:
            continue
        if identity.gpu in seen:
            return (
                f"ranks {seen[identity.gpu]} and {rank} on {identity.host} share the GPU {identity.gpu}; "
                "one task needs one GPU: ask for as many GPUs per node as tasks per node"
            )
        seen[identity.gpu] = rank
    return None


def _meet_rank_0(
    env: RankEnv, attempt: AttemptDirectory, identity: Identity, *, key: bytes, timeout: timedelta
) -> Rendezvous:
    deadline = time.monotonic() + timeout.total_seconds()
    own_host = identity.host
    poll_s = max(_POLL_S, env.world_size / _LOOKS_PER_S)

    published = _wait_for(lambda: read_address(attempt), attempt, deadline, poll_s=poll_s)
    if published is None:
        host_of_rank_0 = env.host_of(0)
        if not host_of_rank_0:
            host_of_rank_0 = own_host if env.nodes == 1 else "the first host"
        raise RendezvousError(
            f"rank 0 on {host_of_rank_0} did not appear within the rendezvous timeout (seen from {own_host})"
        )

    hello = json.dumps({"rank": env.rank, "identity": asdict(identity)}).encode()
    connection = _wait_for(lambda: _first_reachable(published, key, hello, deadline), attempt, deadline, poll_s=poll_s)
    if connection is None:
        raise RendezvousError(
            f"rank {env.rank} on {own_host} cannot reach rank 0 on {published.host} at "
            f"{', '.join(published.addresses)} port {published.port}; let the hosts of a job reach each other on ports "
            f"{PORTS.start}-{PORTS.stop - 1}"
        )

    address, client = connection
    with client:
        try:
            reply = json.loads(client.reply(deadline=deadline + _REPLY_GRACE_S))
        except TimeoutError as error:
            raise RendezvousError(
                f"rank 0 on {published.host} sent no reply within {timeout} (seen from rank {env.rank} on {own_host})"
            ) from error
        except ExchangeError as error:
            # Its record names the cause.
            wait_until(lambda: raise_if_a_rank_failed(attempt), timeout_s=_RECORD_TIMEOUT_S, poll_s=_POLL_S)
            raise PeerFailedError(
                f"rank {env.rank} on {own_host} lost rank 0 on {published.host} before all ranks had met: {error}"
            ) from error
    if "port" not in reply:
        error_of_rank_0 = _ERRORS[reply["kind"]]
        raise error_of_rank_0(reply["message"])
    return Rendezvous(address=address, port=reply["port"], interface=interface_of(client.own_address), listener=None)


def _wait_for(look: Callable[[], T], attempt: AttemptDirectory, deadline: float, *, poll_s: float) -> T:
    """Return the first true value of ``look``, or the last other one at the deadline.

    Raises:
        PeerFailedError: a rank has failed meanwhile.
    """

    def look_and_check_ranks() -> T:
        answer = look()
        if not answer:
            raise_if_a_rank_failed(attempt)
        return answer

    return wait_until(look_and_check_ranks, timeout_s=deadline - time.monotonic(), poll_s=poll_s)


def _first_reachable(
    published: PublishedAddress, key: bytes, hello: bytes, deadline: float
) -> tuple[str, ExchangeClient] | None:
    """Return the first of rank 0's addresses at which rank 0 answers, and the connection to it."""
    for address in published.addresses:
        with contextlib.suppress(OSError, ExchangeError):
            return address, ExchangeClient(address, published.port, key, hello, deadline=deadline)
    return None
