"""Wait for a condition that only polling shows: a file of another process, a process that ends, an answer of Slurm."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

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
