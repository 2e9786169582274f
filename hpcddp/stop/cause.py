"""Why a job must leave its nodes: what Slurm says about it, read as one word."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class Cause(StrEnum):
    """Why an attempt ended before its work was done."""

    PREEMPTION = "preemption"
    TIME_LIMIT = "time_limit"
    CANCELLED = "cancelled"
    REQUEUED = "requeued"
    """Somebody else has requeued the job: Slurm without a grace time, an administrator, or its user."""
    NODE_FAILURE = "node_failure"
    CRASH = "crash"
    UNKNOWN = "unknown"


_WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "CONFIGURING", "SPECIAL_EXIT"})
_ENDED: Mapping[str, Cause] = MappingProxyType(
    {
        "BOOT_FAIL": Cause.NODE_FAILURE,
        "CANCELLED": Cause.CANCELLED,
        "DEADLINE": Cause.TIME_LIMIT,
        "NODE_FAIL": Cause.NODE_FAILURE,
        "PREEMPTED": Cause.PREEMPTION,
        "TIMEOUT": Cause.TIME_LIMIT,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """What is known about a job when somebody asks why it must go.

    Args:
        state: ``JobState``, None if Slurm could not be asked or has forgotten the job.
        restarts: ``Restarts``, None like the state.
        restarts_at_start: the restart count that this attempt was started with.
        preempted: whether ``PreemptTime`` holds a time. Slurm forgets it when it requeues the job.
        reason: ``Reason``.
        warned: whether the signal that comes before the time limit was seen.
        error_seen: whether an error record of this attempt exists.
    """

    state: str | None
    restarts: int | None = None
    restarts_at_start: int = 0
    preempted: bool = False
    reason: str | None = None
    warned: bool = False
    error_seen: bool = False


def cause_of(facts: JobFacts) -> Cause:
    """Return why the job must go.

    What Slurm 22.05.8 shows right after the signal (measured; ``+1`` is a raised restart count):

    =============================  ==========  ========  ===========  =========  ============
    what happened                  JobState    Restarts  PreemptTime  Reason     cause
    =============================  ==========  ========  ===========  =========  ============
    preempted, in its grace time   RUNNING     =         a time       None       preemption
    PreemptMode=CANCEL, after it   COMPLETING  =         a time       None       preemption
    preempted without grace        COMPLETING  +1        gone         None       requeued
    the grace time is over         COMPLETING  +1        gone         None       requeued
    scontrol requeue               COMPLETING  +1        gone         None       requeued
    warned of the time limit       RUNNING     =         None         None       time_limit
    the time limit                 COMPLETING  =         None         TimeLimit  time_limit
    scancel                        COMPLETING  =         None         None       cancelled
    a rank crashed                 RUNNING     =         None         None       crash
    =============================  ==========  ========  ===========  =========  ============

    Args:
        facts: what is known.
    """
    if facts.state in _WAITING or (facts.restarts or 0) > facts.restarts_at_start:
        return Cause.REQUEUED
    if facts.preempted:
        return Cause.PREEMPTION
    if facts.state == "COMPLETING":
        return Cause.TIME_LIMIT if facts.reason == "TimeLimit" else Cause.CANCELLED
    ended = _ENDED.get(facts.state or "")
    return ended or _while_running(facts)


def _while_running(facts: JobFacts) -> Cause:
    """Return what the job itself knows, where Slurm says that it runs or says nothing."""
    if facts.error_seen:
        return Cause.CRASH
    return Cause.TIME_LIMIT if facts.warned else Cause.UNKNOWN
