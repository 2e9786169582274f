"""The states of a run, and what each of Slurm's job states means for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from hpcddp.stop.reasons import Cause


class State(StrEnum):
    """The state of a run."""

    PENDING = "pending"
    """Its job waits to start."""
    HELD = "held"
    """Its job waits, and does not start before it is released."""
    REQUEUED = "requeued"
    """It has run, and its job waits to run again, or is about to."""
    STARTING = "starting"
    """Its job runs, and no step was made yet."""
    RUNNING = "running"
    STOPPING = "stopping"
    """It was signalled, and saves or leaves its nodes."""
    SUSPENDED = "suspended"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed out"
    """It reached its time limit, and is not requeued."""
    PREEMPTED = "preempted"
    """It was preempted, and is not requeued."""
    STOPPED = "stopped"
    """It stopped, can be resumed, and is not requeued."""
    LOST = "lost"
    """It left no result, and its job is unknown to Slurm."""
    UNKNOWN = "unknown"
    """It left no result, and its job cannot be queried; or its result cannot be read."""

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


@dataclass(frozen=True, slots=True)
class JobState:
    """What one of Slurm's job states means.

    Args:
        run_state: the state of the run, if it has left no result.
        is_waiting: whether the job's script does not run yet.
        has_ended: whether the job has ended; Slurm purges its record after a while, and may reuse its id.
        cause: why the job has ended, if the state shows it.
    """

    run_state: State
    is_waiting: bool = False
    has_ended: bool = False
    cause: Cause | None = None


_PENDING: Final = JobState(State.PENDING, is_waiting=True)
_HELD: Final = JobState(State.HELD, is_waiting=True)
_FAILED: Final = JobState(State.FAILED, has_ended=True)
_TIMED_OUT: Final = JobState(State.TIMED_OUT, has_ended=True, cause=Cause.TIME_LIMIT)
_NODE_FAILURE: Final = JobState(State.FAILED, has_ended=True, cause=Cause.NODE_FAILURE)

# squeue(1), JOB STATE CODES.
JOB_STATES: Final[Mapping[str, JobState]] = MappingProxyType(
    {
        "PENDING": _PENDING,
        "EXPEDITING": _PENDING,
        "REQUEUED": _PENDING,
        "REQUEUE_FED": _PENDING,
        "REVOKED": _PENDING,
        "REQUEUE_HOLD": _HELD,
        "RESV_DEL_HOLD": _HELD,
        "SPECIAL_EXIT": _HELD,
        "CONFIGURING": JobState(State.STARTING, is_waiting=True),
        "RUNNING": JobState(State.RUNNING),
        "RESIZING": JobState(State.RUNNING),
        "SIGNALING": JobState(State.RUNNING),
        "SUSPENDED": JobState(State.SUSPENDED),
        "STOPPED": JobState(State.SUSPENDED),
        "COMPLETING": JobState(State.STOPPING),
        "STAGE_OUT": JobState(State.STOPPING),
        # A run that finishes leaves a result.
        "COMPLETED": JobState(State.LOST, has_ended=True),
        "FAILED": _FAILED,
        "OUT_OF_MEMORY": _FAILED,
        "CANCELLED": JobState(State.CANCELLED, has_ended=True, cause=Cause.CANCELLED),
        "DEADLINE": _TIMED_OUT,
        "TIMEOUT": _TIMED_OUT,
        "PREEMPTED": JobState(State.PREEMPTED, has_ended=True, cause=Cause.PREEMPTION),
        "BOOT_FAIL": _NODE_FAILURE,
        "NODE_FAIL": _NODE_FAILURE,
    }
)
"""The meaning of each of Slurm's job states. A newer Slurm may have others."""

ENDED_STATES: Final = frozenset(name for name, state in JOB_STATES.items() if state.has_ended)
"""Slurm's states of a job that has ended."""
