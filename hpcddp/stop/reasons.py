"""Stop reasons, exit codes and causes of the end of an attempt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from types import MappingProxyType


class StopReason(IntEnum):
    """Why a rank wants to stop. If ranks have different reasons in one step, the largest number wins."""

    NONE = 0
    REQUESTED = 1
    """The user's code asked for it."""
    DEADLINE = 2
    """The end of the job is near by the ranks' own clock."""
    WARNED = 3
    """USR2: Slurm says that the time limit is near."""
    TERMINATED = 4
    """TERM: the job must leave its nodes."""
    INTERRUPTED = 5
    """INT: Ctrl-C."""

    @property
    def word(self) -> str:
        """The name of the reason in logs and records."""
        return self.name.lower()


class ExitCode(IntEnum):
    """Exit codes of tasks and batch scripts; the supervisor decides on a requeue by them."""

    FINISHED = 0
    NO_CHECKPOINT = 65
    """There is no usable checkpoint although there should be one."""
    USER_CODE = 70
    """The user's code failed: never requeued."""
    INFRASTRUCTURE = 71
    """A peer, a node or the network failed."""
    STOPPED = 75
    """Stopped with a checkpoint; wants to go on."""
    FENCED = 76
    """Another attempt owns the run."""
    NO_PROGRESS = 93
    HANG = 124
    INTERRUPTED = 130


class Cause(StrEnum):
    """Why an attempt ended before its work was done."""

    PREEMPTION = "preemption"
    TIME_LIMIT = "time_limit"
    CANCELLED = "cancelled"
    REQUEUED = "requeued"
    """The job was requeued by Slurm without a grace time, by an administrator, or by its user."""
    NODE_FAILURE = "node_failure"
    CRASH = "crash"
    """A rank failed or left no record, or the tasks were told to end and nothing shows why."""
    UNKNOWN = "unknown"
    """Slurm shows no cause. At the end of an attempt: its own code asked to stop, or all of its ranks agreed to."""


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
    """Facts about a job that determine why it ends.

    Args:
        state: ``JobState``; None if Slurm did not answer or no longer knows the job.
        restarts: ``Restarts``; None like the state.
        restarts_at_start: the restart count when this attempt started.
        preempted: whether ``PreemptTime`` is a time. Slurm clears it when it requeues the job.
        reason: ``Reason``.
        warned: whether the signal that comes before the time limit arrived.
        error_seen: whether a failure record of this attempt exists.
    """

    state: str | None
    restarts: int | None = None
    restarts_at_start: int = 0
    preempted: bool = False
    reason: str | None = None
    warned: bool = False
    error_seen: bool = False


def cause_of(facts: JobFacts) -> Cause:
    """Return why the job ends.

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
    """Return the cause by the job's own facts, for a job that runs or that Slurm says nothing about."""
    if facts.error_seen:
        return Cause.CRASH
    return Cause.TIME_LIMIT if facts.warned else Cause.UNKNOWN
