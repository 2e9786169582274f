"""The exchange holds against others at the port: who does not know the key learns nothing and changes nothing."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest

from hpcddp.task import exchange
from hpcddp.task.exchange import ExchangeClient, ExchangeError, ExchangeServer

KEY = b"the key"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def rank_of(hello: bytes) -> int:
    return int(hello.split()[1])


def serve(
    listener: socket.socket, *, expected: int, timeout_s: float = 60, key: bytes = KEY, reply: bytes = b"all are here"
) -> Mapping[int, bytes]:
    with ExchangeServer(listener, key, expected=expected, rank_of=rank_of) as server:
        found = server.gather(deadline=time.monotonic() + timeout_s, watch=lambda: None)
        server.send_reply(reply)
        return found


def enter(listener: socket.socket, rank: int, key: bytes = KEY, *, timeout_s: float = 60) -> ExchangeClient:
    until = time.monotonic() + timeout_s
    return ExchangeClient("127.0.0.1", port_of(listener), key, b"rank %d" % rank, deadline=until)


def deadline() -> float:
    return time.monotonic() + 60


def test_the_ranks_are_known_and_get_the_reply(listener: socket.socket, pool: ThreadPoolExecutor) -> None:
    found = pool.submit(serve, listener, expected=2)
    with enter(listener, 2) as second, enter(listener, 1) as first:
        assert [client.reply(deadline=deadline()) for client in (first, second)] == [b"all are here"] * 2
    assert found.result() == {1: b"rank 1", 2: b"rank 2"}


def test_who_does_not_know_the_key_is_not_accepted(listener: socket.socket, pool: ThreadPoolExecutor) -> None:
    found = pool.submit(serve, listener, expected=1)
    with pytest.raises(ExchangeError):
        enter(listener, 1, key=b"another key")
    enter(listener, 1).__exit__()
    assert found.result() == {1: b"rank 1"}


def test_who_does_not_know_the_key_is_not_taken_for_rank_0(listener: socket.socket, pool: ThreadPoolExecutor) -> None:
    found = pool.submit(serve, listener, expected=1, key=b"another key", timeout_s=1)
    with pytest.raises(ExchangeError):
        enter(listener, 1)
    assert found.result() == {}


def answering(listener: socket.socket, answers: Callable[[bytes], bytes]) -> None:
    """Answer one rank without knowing the key."""
    connection, _ = listener.accept()
    with connection:
        connection.sendall(bytes(32))
        connection.sendall(answers(connection.recv(1 << 16)))


@pytest.mark.parametrize(
    "answers",
    [lambda _: b"\xff" * 100, lambda _: bytes(100), lambda said: said[32:], lambda _: b""],
    ids=["too long", "zeros", "the rank's own message", "nothing"],
)
def test_what_an_unauthenticated_process_answers_is_not_taken_for_rank_0s(
    listener: socket.socket, pool: ThreadPoolExecutor, answers: Callable[[bytes], bytes]
) -> None:
    answered = pool.submit(answering, listener, answers)
    with pytest.raises(ExchangeError):
        enter(listener, 1)
    answered.result()


@pytest.mark.parametrize("timeout_s", [0.0, 0.1])
def test_who_says_nothing_is_given_up_at_the_deadline(listener: socket.socket, timeout_s: float) -> None:
    with pytest.raises(TimeoutError):
        enter(listener, 1, timeout_s=timeout_s)


def relayed(listener: socket.socket, server: int, changes: Callable[[bytes], bytes]) -> None:
    """Pass on what a rank and rank 0 send, and change the reply."""
    connection, _ = listener.accept()
    with connection, socket.create_connection(("127.0.0.1", server)) as to_rank_0:
        connection.sendall(to_rank_0.recv(32))
        to_rank_0.sendall(connection.recv(1 << 16))
        connection.sendall(to_rank_0.recv(36))
        connection.sendall(changes(to_rank_0.recv(1 << 16)))


@pytest.mark.parametrize(
    "changes", [lambda reply: reply[:-1] + b"?", lambda reply: reply[:10]], ids=["changed", "cut off"]
)
def test_a_reply_that_was_changed_on_its_way_is_refused(
    listener: socket.socket, changes: Callable[[bytes], bytes]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as between, ThreadPoolExecutor(2) as pool:
        pool.submit(serve, listener, expected=1)
        pool.submit(relayed, between, port_of(listener), changes)
        with enter(between, 1) as client, pytest.raises(ExchangeError):
            client.reply(deadline=deadline())


def test_the_hello_of_an_earlier_exchange_is_refused(listener: socket.socket, pool: ThreadPoolExecutor) -> None:
    seen: list[bytes] = []

    def listen_in() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(bytes(32))
            seen.append(connection.recv(1 << 16))

    heard = pool.submit(listen_in)
    with pytest.raises(ExchangeError):
        enter(listener, 1)
    heard.result()
    found = pool.submit(serve, listener, expected=1, timeout_s=1)
    with socket.create_connection(("127.0.0.1", port_of(listener))) as connection:
        connection.recv(32)
        connection.sendall(seen[0])
        assert connection.recv(100) == b""
    assert found.result() == {}


def test_a_rank_that_has_gone_before_the_reply_is_not_there(listener: socket.socket, pool: ThreadPoolExecutor) -> None:
    found = pool.submit(serve, listener, expected=3, timeout_s=1)
    with enter(listener, 1):
        enter(listener, 2).__exit__()
        assert found.result() == {1: b"rank 1"}


def test_a_rank_that_connects_again_counts_once(listener: socket.socket, pool: ThreadPoolExecutor) -> None:
    found = pool.submit(serve, listener, expected=2)
    with enter(listener, 1), enter(listener, 1) as again, enter(listener, 2):
        assert again.reply(deadline=deadline()) == b"all are here"
    assert found.result().keys() == {1, 2}


def test_a_rank_waits_no_longer_than_its_deadline(listener: socket.socket, pool: ThreadPoolExecutor) -> None:
    found = pool.submit(serve, listener, expected=2)
    with enter(listener, 1) as client, pytest.raises(TimeoutError):
        client.reply(deadline=time.monotonic() + 0.1)
    with enter(listener, 1), enter(listener, 2):
        found.result()


def test_of_many_that_are_not_authenticated_only_some_are_kept(
    listener: socket.socket, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "_MOST_UNAUTHENTICATED", 5)
    found = pool.submit(serve, listener, expected=1)
    connections = [socket.create_connection(("127.0.0.1", port_of(listener)), timeout=60) for _ in range(20)]
    try:
        for connection in connections[:15]:
            connection.recv(32)
            assert connection.recv(32) == b""
    finally:
        for connection in connections:
            connection.close()
    enter(listener, 1).__exit__()
    found.result()


def test_who_proves_nothing_for_some_seconds_is_closed(
    listener: socket.socket, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "_AUTHENTICATION_TIMEOUT_S", 0.2)
    found = pool.submit(serve, listener, expected=1)
    with socket.create_connection(("127.0.0.1", port_of(listener)), timeout=60) as connection:
        connection.recv(32)
        assert connection.recv(32) == b""
    enter(listener, 1).__exit__()
    found.result()


def test_the_watch_ends_the_wait(listener: socket.socket) -> None:
    def watch() -> None:
        raise KeyError

    with ExchangeServer(listener, KEY, expected=1, rank_of=rank_of) as server, pytest.raises(KeyError):
        server.gather(deadline=deadline(), watch=watch)


def test_the_limit_of_open_files_is_raised_for_many_ranks(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = [1024, 4096]
    monkeypatch.setattr("resource.getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr("resource.setrlimit", lambda _, both: limits.__setitem__(slice(None), both))
    with ExchangeServer(listener, KEY, expected=8, rank_of=rank_of):
        assert limits == [1024, 4096]
    with ExchangeServer(listener, KEY, expected=2047, rank_of=rank_of):
        assert limits == [2815, 4096]
    with ExchangeServer(listener, KEY, expected=10239, rank_of=rank_of):
        assert limits == [4096, 4096]
