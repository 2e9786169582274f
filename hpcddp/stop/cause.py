"""Why a job must leave its nodes: what Slurm says about it, read as one word."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

# Slurm warns up to a minute before the lead that it was asked for (46 to 60 s early, measured), and its own clock may
# differ from the node's by a little.
_EARLY_S = 90.0

_RUNNING = frozenset({"RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING"})
_WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "CONFIGURING", "SPECIAL_EXIT"})
_FINAL = {"TIMEOUT": "time_limit", "DEADLINE": "time_limit", "NODE_FAIL": "node_failure", "BOOT_FAIL": "node_failure"}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """What was known about a job when it was asked why it must go.

    Args:
        state: ``JobState``, None if Slurm could not be asked or has forgotten the job.
        restarts: ``Restarts``, None like the state.
        preempted: whether ``PreemptTime`` holds a time. Slurm forgets it once it has requeued the job.
        reason: ``Reason``.
        end_time: when the job's time is over, in seconds since the epoch; None without a limit. Preemption moves it.
        now: seconds since the epoch, by the clock of whoever asks.
        lead_s: how long before its end the job asked to be warned.
        restarts_at_start: the restart count that this attempt was started with.
        error_seen: whether an error record of this attempt exists.
    """

    state: str | None
    restarts: int | None
    now: float
    restarts_at_start: int
    preempted: bool = False
    reason: str | None = None
    end_time: float | None = None
    lead_s: float = 0.0
    error_seen: bool = False


def cause_of(facts: JobFacts) -> Cause:
    """Return why the job must go.

    The rows, as Slurm 22.05.8 shows them a second after the signal (measured; ``+1`` is a raised restart count):

    ========================  ==========  ========  ===========  ============
    what happened             state       restarts  PreemptTime  cause
    ========================  ==========  ========  ===========  ============
    preempted, in its grace   RUNNING     =         a time       preemption
    preempted without grace   COMPLETING  +1        gone         requeued
    the grace is over         COMPLETING  +1        gone         requeued
    scontrol requeue          COMPLETING  +1        gone         requeued
    a node went down          COMPLETING  +1        gone         requeued
    warned of the limit       RUNNING     =         None         time_limit
    at the limit              COMPLETING  =         None         time_limit
    scancel                   COMPLETING  =         None         cancelled
    a rank crashed            RUNNING     =         None         crash
    ========================  ==========  ========  ===========  ============

    Args:
        facts: what is known.
    """
    if facts.restarts is not None and facts.restarts > facts.restarts_at_start:
        return Cause.REQUEUED
    if facts.state in _RUNNING:
        return _while_running(facts)
    if facts.state in _WAITING:
        return Cause.REQUEUED
    if facts.state == "PREEMPTED" or facts.preempted:
        return Cause.PREEMPTION
    if facts.state in _FINAL:
        return Cause(_FINAL[facts.state])
    if facts.state == "COMPLETING":
        # Slurm says TIMEOUT only when all is over.
        late = facts.end_time is not None and facts.reason == "TimeLimit"
        return Cause.TIME_LIMIT if late else Cause.CANCELLED
    if facts.state == "CANCELLED":
        return Cause.CANCELLED
    return Cause.CRASH if facts.error_seen else Cause.UNKNOWN


def _while_running(facts: JobFacts) -> Cause:
    if facts.preempted:
        return Cause.PREEMPTION
    if facts.error_seen:
        return Cause.CRASH
    if facts.end_time is not None and facts.end_time - facts.now <= facts.lead_s + _EARLY_S:
        return Cause.TIME_LIMIT
    return Cause.UNKNOWN
