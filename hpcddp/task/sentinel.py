"""A process beside each rank that tells the membership service when the rank has begun to end, and how.

The kernel frees the memory of a killed process before it closes its connections, which takes seconds for gigabytes, and
srun says how it has ended only afterwards. Two fields of /proc/PID/stat show both at once (proc(5)): the flag
PF_EXITING, and the exit status.

The process imports neither torch nor the job file. It ignores the signals that Slurm sends to all processes of a step,
and ends with its rank.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

from hpcddp.task.channel import ChannelClosedError, connect

# Positions after the command's name in /proc/PID/stat, and a flag of include/linux/sched.h.
_STATE = 0
_FLAGS = 6
_EXIT_STATUS = 49
_PF_EXITING: Final = 0x4
_POLL_S: Final = 0.01
_CONNECT_S: Final = 3.0
_STAT_BYTES: Final = 4096
_IGNORED: Final = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# An object of Popen that is freed while its process runs warns.
_STARTED: Final[list[subprocess.Popen[bytes]]] = []


def start_sentinel(addresses: Sequence[str], port: int, key: str, *, process: str, node: str) -> None:
    """Start the sentinel of this process.

    Args:
        addresses: where the membership service may be.
        key: the attempt's key; it goes through a pipe.
        process: what names this process to the service.
        node: the name of its node in Slurm.

    Raises:
        OSError: it cannot be started.
    """
    start = {
        "pid": os.getpid(),
        "addresses": list(addresses),
        "port": port,
        "key": key,
        "hello": {"watches": process, "node": node},
    }
    # Its output would keep the files of the rank open.
    sentinel = subprocess.Popen(
        [sys.executable, "-P", "-m", "hpcddp.task.sentinel"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _STARTED.append(sentinel)
    if sentinel.stdin is not None:
        with sentinel.stdin as pipe:
            pipe.write(json.dumps(start).encode())


def exit_status(stat: str) -> int | None:
    """Return the status of a process that has begun to end, as waitpid(2) has it; None while it is not known.

    Args:
        stat: the content of its /proc/PID/stat.
    """
    # The name is in parentheses and may contain spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    status = int(fields[_EXIT_STATUS])
    if fields[_STATE] in {"Z", "X"}:
        return status
    # Before Linux 6.8 the status is set a moment after the flag.
    is_exiting = int(fields[_FLAGS]) & _PF_EXITING
    return status if is_exiting and status else None


def _main() -> int:
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    text = sys.stdin.read()
    if not text:
        # The rank has ended before it could say anything.
        return 1
    start: dict[str, Any] = json.loads(text)
    try:
        stat = os.open(f"/proc/{start['pid']}/stat", os.O_RDONLY)
        deadline = time.monotonic() + _CONNECT_S
        channel = connect(start["addresses"], start["port"], start["key"].encode(), start["hello"], deadline=deadline)
        while (status := exit_status(os.pread(stat, _STAT_BYTES, 0).decode(errors="replace"))) is None:
            time.sleep(_POLL_S)
    except (OSError, ChannelClosedError):
        # The service does not answer, or the rank has gone already.
        return 1
    channel.send({"exit": status})
    channel.close()
    return 0


if __name__ == "__main__":
    sys.exit(_main())
