"""Measure what grows with the number of ranks: the rendezvous at rank 0, alone and while strangers connect to its port.

    python -m benchmarks.scale [--ranks 8 2048 10240] [--clients 4] [--output FILE]

Processes on this machine speak the exchange of the ranks (``hpcddp.task.exchange``), each for many of them, with the
real listener of rank 0. Prints one JSON document: for each number of ranks and each kind of stranger the seconds until
all ranks have been accepted and have the reply, rank 0's CPU time and memory, and the time of one rank.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import secrets
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

from hpcddp.task.exchange import ExchangeClient, ExchangeServer
from tests.task.strangers import STRANGERS

_TIMEOUT_S: Final = 300.0
_FLOODING_PROCESSES: Final = 2
# What a rank says of itself has about this size.
_HELLO_BYTES: Final = 300
_CONTEXT: Final = multiprocessing.get_context("fork")


def measure(ranks: int, clients: int, stranger: str | None) -> dict[str, Any]:
    """Let ranks meet once.

    Args:
        ranks: W.
        clients: processes that speak for the W - 1 other ranks.
        stranger: the kind of the strangers; None is without any.
    """
    key = secrets.token_bytes(32)
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=4096))
        port = int(listener.getsockname()[1])
        for _ in range(_FLOODING_PROCESSES if stranger else 0):
            stack.enter_context(_process(STRANGERS[str(stranger)], port, _CONTEXT.Event()))
        answers = []
        server = stack.enter_context(ExchangeServer(listener, key, expected=ranks - 1, rank_of=_rank_of))
        began, cpu_began = time.monotonic(), time.process_time()
        for number in range(clients):
            answer, sender = _CONTEXT.Pipe(duplex=False)
            answers.append(answer)
            stack.enter_context(_process(_be_ranks, port, key, range(1 + number, ranks, clients), sender))
        met = server.gather(deadline=began + _TIMEOUT_S, watch=lambda: None)
        met_s = time.monotonic() - began
        server.send_reply(b'{"port": 20000}')
        told_s, cpu_s = time.monotonic() - began, time.process_time() - cpu_began
        times_s = [time_s for answer in answers for time_s in answer.recv()]
    return {
        "ranks": ranks,
        "strangers": stranger,
        "met": len(met) + 1,
        "met_s": round(met_s, 3),
        "told_s": round(told_s, 3),
        "cpu_of_rank_0_s": round(cpu_s, 3),
        "most_memory_of_rank_0_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "rank_median_ms": round(1e3 * statistics.median(times_s), 3),
        "rank_most_ms": round(1e3 * max(times_s), 1),
    }


def _rank_of(hello: bytes) -> int:
    return int(hello.split()[0])


def _be_ranks(port: int, key: bytes, ranks: Sequence[int], sender: Connection) -> None:
    """Meet rank 0 as several ranks, one after the other, and send how long each of them took."""
    times_s, connections = [], []
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    for rank in ranks:
        began = time.monotonic()
        hello = f"{rank} ".encode().ljust(_HELLO_BYTES)
        connections.append(ExchangeClient("127.0.0.1", port, key, hello, deadline=began + _TIMEOUT_S))
        times_s.append(time.monotonic() - began)
    for connection in connections:
        connection.reply(deadline=time.monotonic() + _TIMEOUT_S)
    sender.send(times_s)


@contextmanager
def _process(target: Any, *arguments: Any) -> Iterator[BaseProcess]:  # noqa: ANN401  functions of several types
    process = _CONTEXT.Process(target=target, args=arguments, daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def main() -> None:
    """Measure, and print the document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 2048, 10240])
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    document = {
        "date": datetime.now(UTC).date().isoformat(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "rendezvous": [
            measure(ranks, min(options.clients, ranks - 1), stranger)
            for ranks in options.ranks
            for stranger in (None, *STRANGERS)
        ],
    }
    text = json.dumps(document, indent=2)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
