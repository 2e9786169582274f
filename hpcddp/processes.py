"""The processes of this machine, as the kernel shows them (proc(5)), and the wait for a condition.

A process that has ended shows nothing.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

_PROC: Final = Path("/proc")
# Positions after the command's name in /proc/PID/stat.
_STATE = 0
_PARENT = 1
_START = 19
_ENDED: Final = frozenset("ZX")


def signal_name(number: int) -> str:
    """Return the name of a signal, such as ``SIGKILL``; ``signal 40`` for one without, as most real-time signals."""
    if number in list(signal.Signals):
        return signal.Signals(number).name
    return f"signal {number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process, told apart from a later one with the same id by its start time.

    Attributes:
        pid: its id in this process's view.
        parent: its parent's id.
        start: clock ticks from the machine's start to the process's.
    """

    pid: int
    parent: int
    start: int


def find(pid: int) -> Process | None:
    """Return the process with this id, or None if there is none or it is a zombie."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name is in parentheses and may contain spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    if fields[_STATE] in _ENDED:
        return None
    return Process(pid=pid, parent=int(fields[_PARENT]), start=int(fields[_START]))


def all_processes() -> Iterator[Process]:
    """Yield the processes of all users that run."""
    for entry in _PROC.iterdir():
        if entry.name.isdecimal() and (process := find(int(entry.name))) is not None:
            yield process


def own_processes() -> Iterator[Process]:
    """Yield the user's own processes that run; the environment of another user's may name any path."""
    for process in all_processes():
        with suppress(OSError):
            if (_PROC / str(process.pid)).stat().st_uid == os.getuid():
                yield process


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    with suppress(OSError):
        return [int(child) for thread in (_PROC / str(pid) / "task").iterdir() for child in _read_children(thread)]
    return []


def _read_children(thread: Path) -> Iterator[str]:
    # The thread may have ended.
    with suppress(OSError):
        yield from (thread / "children").read_text(encoding="ascii").split()


def command_line(pid: int | str) -> list[str]:
    """Return the words of a process's command line."""
    return _strings(pid, "cmdline")


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with; empty where it is another user's."""
    return dict(entry.split("=", 1) for entry in _strings(pid, "environ") if "=" in entry)


def _strings(pid: int | str, name: str) -> list[str]:
    try:
        text = os.fsdecode((_PROC / str(pid) / name).read_bytes())
    except OSError:
        return []
    return text.removesuffix("\0").split("\0") if text else []


def program_of(pid: int) -> str:
    """Return the file name of the program that a process runs; empty if that cannot be read."""
    try:
        return (_PROC / str(pid) / "exe").readlink().name
    except OSError:
        return ""


def handled_signals(pid: int) -> frozenset[int]:
    """Return the signals that a process has handlers for."""
    try:
        status = (_PROC / str(pid) / "status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return frozenset()
    mask = int(next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0"), 16)
    return frozenset(signum for signum in range(1, signal.NSIG) if mask >> (signum - 1) & 1)


def boot_id() -> str:
    """Return the id of this boot of the machine, from which start times count."""
    return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


T = TypeVar("T")


def wait_until(condition: Callable[[], T], *, timeout_s: float, poll_s: float) -> T:
    """Call ``condition`` until it returns a true value, and return that value; at the deadline the last false one.

    It is called at least once, and an exception of it ends the wait.

    Args:
        condition: returns a true value when the wait is over.
        timeout_s: seconds; infinity waits for ever.
        poll_s: seconds between two calls.
    """
    deadline = time.monotonic() + timeout_s
    while not (outcome := condition()) and time.monotonic() < deadline:
        time.sleep(poll_s)
    return outcome
