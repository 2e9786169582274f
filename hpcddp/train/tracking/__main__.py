"""The process of the trackers: follows ``metrics.jsonl`` until it is told how the attempt has ended.

The first line of its input is the order, the second one the ending's name. Where that never comes, rank 0 has been
killed, and nobody knows how the run goes on.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable

from hpcddp.train.tracking.follower import Follower
from hpcddp.train.tracking.order import Order
from hpcddp.train.tracking.protocol import Ending, Subject, Tracker

# Rank 0 waits less. On a cluster nothing outlives the job step anyway.
_LONGEST_END_S = 120.0


def main() -> None:
    """Follow to the end."""
    order = Order.from_json(sys.stdin.readline())
    followers = [
        Follower(name, order.subject(name), connect=_opener(name, order.first_step), warn=_warn) for name in order.names
    ]
    for follower in followers:
        follower.start()
    word = sys.stdin.readline().strip()
    for follower in followers:
        follower.end(Ending[word] if word else None)
    for follower in followers:
        follower.join(_LONGEST_END_S)
    sys.stderr.flush()
    # What a tracker leaves behind, threads or hooks, is waited for no longer.
    os._exit(0)


def _opener(name: str, first_step: int | None) -> Callable[[Subject], Tracker]:
    def connect(subject: Subject) -> Tracker:
        module = importlib.import_module(f"hpcddp.train.tracking.{name}")
        tracker: Tracker = module.connect(subject, first_step)
        return tracker

    return connect


def _warn(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
