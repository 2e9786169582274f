"""Versions of Slurm, and what users see of the way in which some differ; ``docs/slurm-versions.md`` has all of it."""

from __future__ import annotations

import re
from typing import Final

Version = tuple[int, ...]

OLDEST: Final = "22.05"
"""The oldest version that hpcddp runs on."""
# Each with the first version that does it, and the first that does it no more.
_REQUEUED_IN_GRACE_TIME: Final = (
    "a script that ends by itself within the grace time of a preemption is requeued, or is PREEMPTED with "
    "PreemptMode=CANCEL; before, it was COMPLETED"
)
_STAYS_PREEMPTED: Final = (
    "a job that was preempted with a grace time stays marked as preempted after its requeue: at its next end Slurm "
    "requeues it once more, whatever its exit code, and a job that has finished shows PREEMPTED"
)
_VISIBLE: Final[tuple[tuple[Version, Version, str], ...]] = (
    ((24, 5), (10_000,), _REQUEUED_IN_GRACE_TIME),
    ((24, 5), (26, 5, 4), _STAYS_PREEMPTED),
)


def version_of(text: str) -> Version:
    """Return the numbers of a version such as ``24.11.5``; empty if the text does not begin with one."""
    match = re.match(r"[0-9]+(\.[0-9]+)*", text)
    return () if match is None else tuple(int(number) for number in match[0].split("."))


def visible_differences(version: str) -> list[str]:
    """Return what users of a version see, in plain text, a sentence each."""
    return [fact for since, before, fact in _VISIBLE if since <= version_of(version) < before]
