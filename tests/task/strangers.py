"""Other programs at the port of the ranks: they know its number, and not the key."""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Event


def _flood(port: int, ended: Event, *, most_open: int, says: bytes) -> None:
    held: deque[socket.socket] = deque()
    while not ended.is_set():
        connection = socket.socket()
        connection.settimeout(0)
        with suppress(OSError):
            connection.connect_ex(("127.0.0.1", port))
            held.append(connection)
        with suppress(OSError):
            held[len(held) // 2].send(says)
        while len(held) > most_open:
            held.popleft().close()
        time.sleep(0.0005)
    for connection in held:
        connection.close()


def silent(port: int, ended: Event) -> None:
    """Open connections, say nothing and keep them."""
    _flood(port, ended, most_open=3000, says=b"")


def brief(port: int, ended: Event) -> None:
    """Open connections and close them at once."""
    _flood(port, ended, most_open=1, says=b"")


def garbling(port: int, ended: Event) -> None:
    """Say what makes no sense."""
    _flood(port, ended, most_open=1000, says=os.urandom(1000))


def slow(port: int, ended: Event) -> None:
    """Say the beginning of something long."""
    _flood(port, ended, most_open=1000, says=b"\0")


STRANGERS: Mapping[str, Callable[[int, Event], None]] = {
    function.__name__: function for function in (silent, brief, garbling, slow)
}
