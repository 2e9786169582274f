"""Measure when the death of a process with much memory is noticed: by its sentinel, and by the end of its connection.

    python -m benchmarks.notice [--gib 0 1 4] [--rounds 5] [--output FILE]

Each trial kills one process that has written to all of its memory, and takes both times.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from hpcddp.task.channel import Channel, ChannelClosedError, connect
from hpcddp.task.sentinel import start_sentinel

_KEY: Final = "the token"


def be_killed(port: int, gib: float) -> None:
    """Keep memory, connect as a rank does, and wait."""
    start_sentinel(["127.0.0.1"], port, _KEY, process="rank", node="")
    channel = connect(["127.0.0.1"], port, _KEY.encode(), {"rank": True}, deadline=time.monotonic() + 30)
    memory = b"1" * int(gib * 2**30)
    sys.stdout.write(f"{len(memory)} bytes\n")
    sys.stdout.flush()
    with suppress(ChannelClosedError):
        channel.receive()


def times_of_a_death(gib: float) -> dict[str, float]:
    """Kill a process, and return the seconds until its sentinel says so, and until its connection ends."""
    ends: dict[str, float] = {}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        words = [sys.executable, "-m", "benchmarks.notice", "--port", str(listener.getsockname()[1]), "--gib", str(gib)]
        rank = subprocess.Popen(words, stdout=subprocess.PIPE)
        listeners = []
        for _ in range(2):
            channel = Channel(listener.accept()[0], _KEY.encode(), is_service=True)
            hello = channel.receive()
            channel.send({"welcome": 0})
            channel.greeted()
            name = "connection" if "rank" in hello else "sentinel"
            listeners.append(threading.Thread(target=_note_end, args=(channel, name, ends)))
        for thread in listeners:
            thread.start()
        if rank.stdout is not None:
            rank.stdout.readline()
        killed_at = time.monotonic()
        os.kill(rank.pid, signal.SIGKILL)
        for thread in listeners:
            thread.join()
        rank.communicate()
    return {name: ended_at - killed_at for name, ended_at in ends.items()}


def _note_end(channel: Channel, name: str, ends: dict[str, float]) -> None:
    with suppress(ChannelClosedError):
        channel.receive()
    ends[name] = time.monotonic()
    channel.close()


def main() -> None:
    """Run the trials, print and write what came of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, nargs="+", default=[0, 1, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.port is not None:
        be_killed(options.port, options.gib[0])
    results = []
    for _ in range(options.rounds):
        for gib in options.gib:
            results.append({"gib": gib, "load": round(os.getloadavg()[0], 1), **times_of_a_death(gib)})
            print(json.dumps(results[-1]), flush=True)
    for gib in options.gib:
        for name in ("sentinel", "connection"):
            times = [result[name] for result in results if result["gib"] == gib]
            middle = statistics.median(times)
            print(f"{gib:g} GiB, {name}: {min(times):.3f} / {middle:.3f} / {max(times):.3f} s")
    if options.output is not None:
        options.output.write_text(json.dumps({"what": __doc__.splitlines()[0], "trials": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
