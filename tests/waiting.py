"""Wait for something that a test has caused in another process or thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")


def wait_until(condition: Callable[[], T], what: str | Callable[[], object], timeout_s: float = 60) -> T:
    """Wait until a condition is true, and return its value; else the test fails.

    Args:
        condition: called about twenty times a second; one that takes longer, as a command does, a tenth of the time,
            but once a second, or every five seconds if it takes half a second.
        what: what is waited for, or a function that says how it is instead.
        timeout_s: seconds.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        asked_at = time.monotonic()
        found = condition()
        now = time.monotonic()
        if found:
            return found
        if now >= deadline:
            pytest.fail(f"not within {timeout_s} s: {what if isinstance(what, str) else what()}")
        # What is waited for needs the processor.
        took_s = now - asked_at
        longest_s = 1 if took_s < 0.5 else 5
        time.sleep(max(0.05, 3 * took_s, min(9 * took_s, longest_s)))


def wait_for_text(path: Path, text: str, timeout_s: float = 120) -> None:
    """Wait until a file holds a text."""
    wait_until(lambda: path.exists() and text in path.read_text(), f"{text!r} in {path}", timeout_s)


def wait_until_gone(process_id: int, timeout_s: float = 60) -> None:
    """Wait until there is no such process."""
    wait_until(lambda: not Path(f"/proc/{process_id}").exists(), f"the end of process {process_id}", timeout_s)


def join_threads(name: str) -> None:
    """Wait for the end of every thread of a name."""
    # From Python 3.13 on a thread that ends leaves threading.enumerate() shortly before is_alive() is false.
    for thread in list(threading._dangling):  # type: ignore[attr-defined]  # a private set of all
        if thread.name == name:
            thread.join()
