"""The exchange in which rank 0 learns who the other ranks of its attempt are, and sends all of them one reply.

Any process that reaches the port can connect, so each side proves that it knows the attempt's key, which only the user
can read:

1. Rank 0 sends a random number.
2. The rank sends a random number of its own, and its hello with a code: HMAC-SHA256 (RFC 2104) with the key over
   both numbers, the kind of the message, and its content.
3. Rank 0 sends an accept with its code at once, and when all ranks are there the reply with its code.

The code of an earlier exchange, of another message or of another attempt is never right. A message is not encrypted.
"""

from __future__ import annotations

import errno
import hmac
import resource
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Self

NUMBER_BYTES: Final = 32
_CODE_BYTES: Final = 32
LENGTH: Final = struct.Struct("!I")
HEAD_BYTES: Final = LENGTH.size + _CODE_BYTES
LONGEST_MESSAGE: Final = 16 * 1024
"""Bytes of the content of a message; small enough to be sent without waiting for the receiver."""

_HELLO: Final = b"hello"
_ACCEPT: Final = b"accept"
_REPLY: Final = b"reply"

_CONNECT_TIMEOUT_S: Final = 3.0
# Rank 0 accepts more slowly while unauthenticated clients connect.
_ACCEPT_TIMEOUT_S: Final = 10.0
# How long a connection may take to authenticate itself, and how many may be open that have not.
_AUTHENTICATION_TIMEOUT_S: Final = 5.0
_MOST_UNAUTHENTICATED: Final = 512
_MOST_ACCEPTED_AT_ONCE: Final = 64
_POLL_S: Final = 0.05
_WATCH_EVERY_S: Final = 0.5
# Files that this process has open besides.
_OTHER_FILES: Final = 256


class ExchangeError(Exception):
    """The other side is not of this attempt, or has closed the connection."""


def code_of(key: bytes, kind: bytes, numbers: bytes, content: bytes) -> bytes:
    """Return the code of a message: its kind and its content, in the connection of these random numbers."""
    return hmac.digest(key, kind + b"\0" + numbers + content, "sha256")


def message(key: bytes, kind: bytes, numbers: bytes, content: bytes) -> bytes:
    """Return a message as it is sent: the length of its content, its code, its content."""
    return LENGTH.pack(len(content)) + code_of(key, kind, numbers, content) + content


@dataclass(slots=True, eq=False)
class _Client:
    """A connection to rank 0.

    Args:
        connection: its socket, which never blocks.
        number: the random number that rank 0 has sent.
        since: when it was accepted, on the monotonic clock.
        received: what it has sent so far.
        numbers: both random numbers, when it is authenticated.
        rank: its rank then.
        hello: what it has sent about itself.
    """

    connection: socket.socket
    number: bytes
    since: float
    received: bytearray = field(default_factory=bytearray)
    numbers: bytes = b""
    rank: int | None = None
    hello: bytes = b""


class ExchangeServer:
    """Rank 0's side: accepts connections, and keeps those that are authenticated.

    One thread serves all of them. A connection that is not authenticated is closed after some seconds, or when too many
    others are open, so that such connections delay neither the ranks nor the deadline.

    Args:
        listener: a listening socket; closing it is the caller's part.
        expected: how many ranks are to come.
        rank_of: returns the rank in a hello; raises ValueError if it has none.
    """

    def __init__(self, listener: socket.socket, key: bytes, *, expected: int, rank_of: Callable[[bytes], int]) -> None:
        self._listener = listener
        self._key = key
        self._expected = expected
        self._rank_of = rank_of
        self._selector = selectors.DefaultSelector()
        # In the order in which they came.
        self._unauthenticated: dict[_Client, None] = {}
        self._ranks: dict[int, _Client] = {}
        _allow_open_files(expected + _MOST_UNAUTHENTICATED + _OTHER_FILES)
        listener.settimeout(0)
        self._selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close all connections."""
        for client in (*self._unauthenticated, *self._ranks.values()):
            client.connection.close()
        self._selector.close()

    def gather(self, *, deadline: float, watch: Callable[[], None]) -> Mapping[int, bytes]:
        """Wait until all ranks are there, or for the deadline, and return the hellos by rank.

        Args:
            deadline: on the monotonic clock.
            watch: called twice a second; what it raises ends the wait.

        Raises:
            OSError: this process may not open more files.
        """
        watch_at = 0.0
        while len(self._ranks) < self._expected:
            now = time.monotonic()
            if now >= deadline:
                break
            if now >= watch_at:
                watch()
                watch_at = now + _WATCH_EVERY_S
            for key, _ in self._selector.select(_POLL_S):
                if key.data is None:
                    self._accept()
                # It may have been closed since, for a newer one.
                elif key.data.connection.fileno() >= 0:
                    self._receive(key.data)
            for client in list(self._unauthenticated):
                if client.since < now - _AUTHENTICATION_TIMEOUT_S:
                    self._close(client)
        return {rank: client.hello for rank, client in self._ranks.items()}

    def send_reply(self, reply: bytes) -> None:
        """Send a reply to all ranks that are there."""
        for client in self._ranks.values():
            with suppress(OSError):
                client.connection.send(message(self._key, _REPLY, client.numbers, reply))

    def _accept(self) -> None:
        for _ in range(_MOST_ACCEPTED_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
                connection.settimeout(0)
                client = _Client(connection, secrets.token_bytes(NUMBER_BYTES), time.monotonic())
                connection.send(client.number)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in {errno.EMFILE, errno.ENFILE}:
                    # The other side has closed the connection.
                    continue
                if not self._unauthenticated:
                    raise
                self._close(next(iter(self._unauthenticated)))
                return
            self._unauthenticated[client] = None
            self._selector.register(connection, selectors.EVENT_READ, client)
            if len(self._unauthenticated) > _MOST_UNAUTHENTICATED:
                self._close(next(iter(self._unauthenticated)))

    def _receive(self, client: _Client) -> None:
        try:
            part = client.connection.recv(LONGEST_MESSAGE)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        # A rank sends nothing after its hello.
        if not part or client.rank is not None:
            self._close(client)
            return
        client.received += part
        try:
            self._authenticate(client)
        except (ValueError, OSError):
            self._close(client)

    def _authenticate(self, client: _Client) -> None:
        """Take a client for a rank if its hello is complete.

        Raises:
            ValueError: it is not a rank of this attempt.
            OSError: it has closed the connection.
        """
        # A random number, and the hello: length, code and content.
        number = bytes(client.received[:NUMBER_BYTES])
        hello = bytes(client.received[NUMBER_BYTES:])
        if len(hello) < HEAD_BYTES:
            return
        (length,) = LENGTH.unpack_from(hello)
        code = hello[LENGTH.size : HEAD_BYTES]
        content = hello[HEAD_BYTES:]
        if length > LONGEST_MESSAGE or len(content) > length:
            raise ValueError("too long")
        if len(content) < length:
            return
        numbers = client.number + number
        right_code = code_of(self._key, _HELLO, numbers, content)
        if not hmac.compare_digest(code, right_code):
            raise ValueError("not of this attempt")
        rank = self._rank_of(content)
        client.connection.send(message(self._key, _ACCEPT, numbers, b""))
        if rank in self._ranks:
            # The rank has connected again.
            self._close(self._ranks[rank])
        client.numbers = numbers
        client.rank = rank
        client.hello = content
        del self._unauthenticated[client]
        self._ranks[rank] = client

    def _close(self, client: _Client) -> None:
        self._selector.unregister(client.connection)
        client.connection.close()
        if client.rank is None:
            del self._unauthenticated[client]
        else:
            del self._ranks[client.rank]


def _allow_open_files(count: int) -> None:
    """Raise this process's limit of open files, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    if hard != resource.RLIM_INFINITY:
        count = min(count, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


class ExchangeClient:
    """Another rank's side: one connection to rank 0, which has accepted it.

    Args:
        hello: what to send about this rank.
        deadline: on the monotonic clock; no more than some seconds for an address that does not answer.

    Attributes:
        own_address: this host's address on the route to rank 0.

    Raises:
        ExchangeError: the process that listens there does not know the key, or does not answer.
        OSError: no process listens there.
    """

    def __init__(self, address: str, port: int, key: bytes, hello: bytes, *, deadline: float) -> None:
        self._key = key
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._connection = socket.create_connection((address, port), timeout=min(left_s, _CONNECT_TIMEOUT_S))
        try:
            deadline = min(deadline, time.monotonic() + _ACCEPT_TIMEOUT_S)
            self.own_address = str(self._connection.getsockname()[0]).removeprefix("::ffff:")
            number = secrets.token_bytes(NUMBER_BYTES)
            self._numbers = self._receive(NUMBER_BYTES, deadline) + number
            self._connection.sendall(number + message(key, _HELLO, self._numbers, hello))
            self._read(_ACCEPT, deadline)
        except BaseException:
            self._connection.close()
            raise

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connection."""
        self._connection.close()

    def reply(self, *, deadline: float) -> bytes:
        """Wait for rank 0's reply and return it.

        Args:
            deadline: on the monotonic clock.

        Raises:
            TimeoutError: it has not come.
            ExchangeError: rank 0 has closed the connection, or the reply is not its own.
        """
        return self._read(_REPLY, deadline)

    def _read(self, kind: bytes, deadline: float) -> bytes:
        head = self._receive(HEAD_BYTES, deadline)
        (length,) = LENGTH.unpack_from(head)
        if length > LONGEST_MESSAGE:
            raise ExchangeError("a message is not from rank 0 of this attempt")
        content = self._receive(length, deadline)
        if not hmac.compare_digest(head[LENGTH.size :], code_of(self._key, kind, self._numbers, content)):
            raise ExchangeError("a message is not from rank 0 of this attempt")
        return content

    def _receive(self, count: int, deadline: float) -> bytes:
        received = b""
        while len(received) < count:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._connection.settimeout(left)
            try:
                part = self._connection.recv(count - len(received))
            except TimeoutError:
                raise
            except OSError as error:
                raise ExchangeError("the connection is closed") from error
            if not part:
                raise ExchangeError("the connection is closed")
            received += part
        return received
