"""The states of a run, one word each, and what Slurm's words mean for it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from hpcddp.slurm.job import JOB_STATES, JobState
from hpcddp.slurm.queue import QueuedJob


class State(StrEnum):
    """What a run is doing, or what became of it."""

    PENDING = "pending"
    """Its job waits to start."""
    HELD = "held"
    """Its job waits, and does not start before somebody releases it."""
    REQUEUED = "requeued"
    """It has run, and its job waits to run again, or is about to."""
    STARTING = "starting"
    """Its job runs, and no step was made yet."""
    RUNNING = "running"
    STOPPING = "stopping"
    """It was told to end, and saves or leaves its nodes."""
    SUSPENDED = "suspended"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed out"
    """Its time was over, and it does not go on by itself."""
    PREEMPTED = "preempted"
    """Its nodes were taken, and it does not go on by itself."""
    STOPPED = "stopped"
    """It stopped where it can be taken up, and does not go on by itself."""
    LOST = "lost"
    """It left no result, and nobody knows its job any more."""
    UNKNOWN = "unknown"
    """It left no result, and nobody can be asked."""

    @property
    def is_alive(self) -> bool:
        """Whether a job of the run waits or runs."""
        return self in _ALIVE

    @property
    def has_nodes(self) -> bool:
        """Whether it holds nodes now."""
        return self in _ON_NODES


_ON_NODES: Final = frozenset({State.STARTING, State.RUNNING, State.STOPPING, State.SUSPENDED})
_ALIVE: Final = _ON_NODES | {State.PENDING, State.HELD, State.REQUEUED}

_OF_JOB: Final[Mapping[JobState, State]] = MappingProxyType(
    {
        JobState.PENDING: State.PENDING,
        JobState.HELD: State.HELD,
        JobState.CONFIGURING: State.STARTING,
        JobState.RUNNING: State.RUNNING,
        JobState.SUSPENDED: State.SUSPENDED,
        JobState.COMPLETING: State.STOPPING,
        # A run that comes to its end leaves a result.
        JobState.COMPLETED: State.LOST,
        JobState.FAILED: State.FAILED,
        JobState.CANCELLED: State.CANCELLED,
        JobState.TIMED_OUT: State.TIMED_OUT,
        JobState.PREEMPTED: State.PREEMPTED,
        JobState.NODE_FAILURE: State.FAILED,
    }
)
_HELD: Final = ("jobheld", "launch failed requeued held", "job requeued in held state")

_RESULTS: Final[Mapping[str, State]] = MappingProxyType(
    {
        "finished": State.FINISHED,
        "failed": State.FAILED,
        "cancelled": State.CANCELLED,
        "stopped": State.STOPPED,
    }
)
_STOPPED_BY: Final[Mapping[str, State]] = MappingProxyType(
    {"time_limit": State.TIMED_OUT, "preemption": State.PREEMPTED}
)


def state_in_slurm(job: QueuedJob) -> State:
    """Return what the state of its job means for a run that has left no result."""
    known = JOB_STATES.get(job.state)
    state = State.UNKNOWN if known is None else _OF_JOB[known]
    reason = job.reason.lower().replace("_", " ").strip("()")
    return State.HELD if state is State.PENDING and reason.startswith(_HELD) else state


def state_of_result(status: str, cause: str | None) -> State:
    """Return the state that a result means.

    Args:
        status: the result's word.
        cause: why the last attempt ended, a ``Cause``'s word; None if that is not known.
    """
    state = _RESULTS.get(status, State.UNKNOWN)
    return _STOPPED_BY.get(cause or "", state) if state is State.STOPPED else state
