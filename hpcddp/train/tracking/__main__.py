"""Process of the trackers: follow ``metrics.jsonl`` until the attempt has ended.

The first line of its standard input is the order, the second one the name of the ending. If the second line is missing,
rank 0 was killed, and the ending is not known.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable

from hpcddp.train.tracking.follower import Follower
from hpcddp.train.tracking.protocol import AttemptEnding, Subject, Tracker, TrackerOrder

# Rank 0 waits for less time. On a cluster no process outlives the job step.
_LONGEST_END_S = 120.0


def main() -> None:
    """Follow to the end."""
    order = TrackerOrder.from_json(sys.stdin.readline())
    followers = [
        Follower(name, order.subject(name), connect=_connector(name, order.first_step), warn=_warn)
        for name in order.names
    ]
    for follower in followers:
        follower.start()
    word = sys.stdin.readline().strip()
    for follower in followers:
        follower.end(AttemptEnding[word] if word else None)
    for follower in followers:
        follower.join(_LONGEST_END_S)
    sys.stderr.flush()
    # Do not wait for threads and exit hooks of the trackers' libraries.
    os._exit(0)


def _connector(name: str, first_step: int | None) -> Callable[[Subject], Tracker]:
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
