"""A connection between a rank and the membership service of its attempt, over which both send JSON documents.

Any process that reaches the port can connect, so each message has a code: HMAC-SHA256 (RFC 2104) with the attempt's key
over two random numbers, one of each side, the direction, the number of the message in it, and the content. A message of
another connection, or a repeated one, is never right. Messages are not encrypted.
"""

from __future__ import annotations

import errno
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from hpcddp.task.exchange import HEAD_BYTES, LENGTH, LONGEST_MESSAGE, NUMBER_BYTES, code_of, message

_COUNT: Final = struct.Struct("!Q")
_CONNECT_TIMEOUT_S: Final = 3.0
_GREETING_TIMEOUT_S: Final = 5.0
# A host that is cut off is noticed after this time, in seconds and in the options of tcp(7).
_KEEP_ALIVE: Final[Mapping[int, int]] = {
    socket.TCP_KEEPIDLE: 1,
    socket.TCP_KEEPINTVL: 1,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 3000,
}


# errno(3): the other host does not answer. The end of a process closes its connections, or resets them.
_UNREACHABLE: Final = frozenset(
    {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN}
)


class ChannelClosedError(Exception):
    """The other side has closed the connection, has gone, or is not of this attempt.

    Args:
        is_cut_off: whether its host does not answer.
    """

    def __init__(self, *, is_cut_off: bool = False) -> None:
        super().__init__()
        self.is_cut_off = is_cut_off


class Channel:
    """One side of a connection.

    Args:
        connection: a connected socket.
        is_service: which side this is.

    Raises:
        ChannelClosedError: the other side sends no number.
    """

    def __init__(self, connection: socket.socket, key: bytes, *, is_service: bool) -> None:
        self._connection = connection
        self._key = key
        self._sending = threading.Lock()
        self._sent = 0
        self._received = 0
        _watch_for_loss(connection)
        self._greet_until: float | None = time.monotonic() + _GREETING_TIMEOUT_S
        own_number = secrets.token_bytes(NUMBER_BYTES)
        try:
            connection.sendall(own_number)
        except OSError as error:
            raise ChannelClosedError from error
        other_number = self._read(NUMBER_BYTES)
        numbers = own_number + other_number if is_service else other_number + own_number
        to_service = b"to service" + numbers
        to_rank = b"to rank" + numbers
        if is_service:
            self._out = to_rank
            self._in = to_service
        else:
            self._out = to_service
            self._in = to_rank

    @property
    def own_address(self) -> str:
        """This host's address on the route to the other side."""
        return str(self._connection.getsockname()[0]).removeprefix("::ffff:")

    @property
    def other_address(self) -> str:
        """The other side's address, as this host sees it."""
        return str(self._connection.getpeername()[0]).removeprefix("::ffff:")

    def send(self, document: Mapping[str, Any]) -> None:
        """Send a document; nothing happens if the other side has gone, which the reader notices."""
        content = json.dumps(document).encode()
        with self._sending, suppress(OSError):
            number = _COUNT.pack(self._sent)
            self._sent += 1
            self._connection.sendall(message(self._key, self._out, number, content))

    def receive(self) -> dict[str, Any]:
        """Wait for a document and return it.

        Raises:
            ChannelClosedError: there will be no other one.
        """
        head = self._read(HEAD_BYTES)
        (length,) = LENGTH.unpack_from(head)
        if length > LONGEST_MESSAGE:
            raise ChannelClosedError
        content = self._read(length)
        code = code_of(self._key, self._in, _COUNT.pack(self._received), content)
        if not hmac.compare_digest(head[LENGTH.size :], code):
            raise ChannelClosedError
        self._received += 1
        try:
            document = json.loads(content)
        except ValueError as error:
            raise ChannelClosedError from error
        if not isinstance(document, dict):
            raise ChannelClosedError
        return document

    def greeted(self) -> None:
        """Wait without a limit from now on: the other side has proven that it knows the key."""
        self._greet_until = None
        self._connection.settimeout(None)

    def close(self) -> None:
        """Close the connection, so that a reader in another thread returns."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _read(self, count: int) -> bytes:
        received = b""
        while len(received) < count:
            try:
                if self._greet_until is not None:
                    self._connection.settimeout(max(0.001, self._greet_until - time.monotonic()))
                part = self._connection.recv(count - len(received))
            except OSError as error:
                raise ChannelClosedError(is_cut_off=error.errno in _UNREACHABLE) from error
            if not part:
                raise ChannelClosedError
            received += part
        return received


def connect(addresses: Sequence[str], port: int, key: bytes, hello: Mapping[str, Any], *, deadline: float) -> Channel:
    """Connect to the service of the attempt, and return the channel when it has answered the hello.

    Args:
        addresses: where it may be.
        hello: the first document.
        deadline: on the monotonic clock.

    Raises:
        ChannelClosedError: it cannot be reached.
    """
    while time.monotonic() < deadline:
        for address in addresses:
            with suppress(OSError, ChannelClosedError):
                return _greet(socket.create_connection((address, port), timeout=_CONNECT_TIMEOUT_S), key, hello)
        time.sleep(0.1)
    raise ChannelClosedError


def _greet(connection: socket.socket, key: bytes, hello: Mapping[str, Any]) -> Channel:
    """Return a channel over a new connection, when the service has answered the hello."""
    try:
        channel = Channel(connection, key, is_service=False)
        channel.send(hello)
        channel.receive()
    except BaseException:
        connection.close()
        raise
    channel.greeted()
    return channel


def _watch_for_loss(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
