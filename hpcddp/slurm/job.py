"""One job in Slurm: the meaning of its state, the query for its record, and the cause of its end."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from hpcddp.errors import write_message
from hpcddp.slurm import commands
from hpcddp.slurm.job_environment import NO_LIMIT_S
from hpcddp.slurm.rank_env import own_job_id
from hpcddp.stop.deadline import KnownEnd
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


_PAUSE_S: Final = 2.0
_UNKNOWN_STATE: Final = JobState(State.UNKNOWN)


def slurm_job_id(environment: Mapping[str, str]) -> str | None:
    """Return the id of this job in Slurm (``123``, ``123_4`` for an array element); None for a local run.

    Args:
        environment: the environment of the batch script or of a task.
    """
    return None if "HPCDDP_LOCAL_JOB_ID" in environment else own_job_id(environment)


def arrays_of(job_ids: Iterable[str]) -> list[str]:
    """Return the ids of jobs, each once; that of the array for its elements."""
    return list(dict.fromkeys(job_id.partition("_")[0] for job_id in job_ids))


def allocation_of(environment: Mapping[str, str]) -> str | None:
    """Return the id of the allocation that a local run has its tasks in (``--cluster here``); None for any other run.

    Args:
        environment: the environment of the batch script or of a task.
    """
    return environment.get("SLURM_JOB_ID") if "HPCDDP_LOCAL_JOB_ID" in environment else None


def nodes_of_job(environment: Mapping[str, str]) -> int | None:
    """Return how many nodes Slurm has given this job; None for a local run.

    Args:
        environment: the environment of the batch script.
    """
    nodes = environment.get("SLURM_JOB_NUM_NODES", "")
    return int(nodes) if slurm_job_id(environment) is not None and nodes.isdecimal() else None


def ask_slurm(job_id: str, *, patience_s: float = 0.0) -> dict[str, str] | None:
    """Return the record of a job; None also if scontrol is not installed, as on some compute nodes.

    Args:
        patience_s: how long to retry while the controller does not answer, in seconds.
    """
    try:
        return wait_for_answer(job_id, patience_s=patience_s)
    except commands.SlurmUnavailableError as error:
        write_message(error.message)
        return None


def wait_for_answer(job_id: str, *, patience_s: float = 0.0) -> dict[str, str] | None:
    """Return the record of a job; None if the controller does not know it, or if scontrol is not installed.

    Args:
        patience_s: how long to retry while the controller does not answer, in seconds.

    Raises:
        SlurmUnavailableError: the controller did not answer in time.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return commands.show_job(job_id)
        except commands.SlurmCommandError as error:
            if not is_transient(error):
                write_message(error.message)
                return None
            if time.monotonic() >= deadline:
                raise
        time.sleep(_PAUSE_S)


def is_transient(error: commands.SlurmCommandError) -> bool:
    """Return whether the same command may succeed when the controller responds again."""
    return isinstance(error, commands.SlurmUnavailableError) and not isinstance(error, commands.SlurmMissingError)


def cause_of(  # noqa: PLR0911  one return for each of the rules, in their order
    job: Mapping[str, str] | None,
    *,
    restarts_at_start: int,
    warned: bool = False,
    error_seen: bool = False,
    preempted: bool = False,
    cancelled: bool = False,
) -> Cause:
    """Return why a job ends.

    What Slurm 22.05.8 shows right after the signal (measured; ``+1`` is a raised restart count). It leaves out
    ``PreemptTime`` where a job waits for its start, also while it still ends after a requeue.

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
    scancel in the grace time      COMPLETING  =         a time       None       see below
    scancel after a requeue        COMPLETING  +1        None         None       cancelled
    slurmctld has lost this start  COMPLETING  =         gone         None       requeued
    the same, when it has ended    CANCELLED   +1        None         None       cancelled
    a rank crashed                 RUNNING     =         None         None       crash
    =============================  ==========  ========  ===========  =========  ============

    Only slurmstepd's notice in the batch log distinguishes a job that is cancelled in the grace time from one that
    PreemptMode=CANCEL has ended.

    Args:
        job: the fields of ``scontrol show job``; None if Slurm did not answer or no longer knows the job.
        restarts_at_start: the restart count when this attempt started.
        warned: whether the signal that comes before the time limit arrived.
        error_seen: whether a failure record of this attempt exists.
        preempted: whether a preemption is known from elsewhere.
        cancelled: whether slurmstepd reports that the job was cancelled, without a cause.
    """
    fields = job or {}
    job_state = JOB_STATES.get(fields.get("JobState", ""), _UNKNOWN_STATE)
    is_ending = fields.get("JobState") == "COMPLETING"
    has_new_restart = int(fields.get("Restarts", "0")) > restarts_at_start
    if job_state.cause is Cause.CANCELLED:
        return Cause.CANCELLED
    if job_state.is_waiting or has_new_restart or is_being_requeued(fields):
        is_cancelled_after_requeue = is_ending and "PreemptTime" in fields
        return Cause.CANCELLED if is_cancelled_after_requeue else Cause.REQUEUED
    if is_ending and cancelled:
        return Cause.CANCELLED
    if preempted or fields.get("PreemptTime", "None") != "None":
        return Cause.PREEMPTION
    if is_ending:
        return Cause.TIME_LIMIT if fields.get("Reason") == "TimeLimit" else Cause.CANCELLED
    if job_state.cause is not None:
        return job_state.cause
    # The job still runs, or there is no record of it.
    if error_seen:
        return Cause.CRASH
    if warned:
        return Cause.TIME_LIMIT
    return Cause.UNKNOWN


def is_being_requeued(job: Mapping[str, str]) -> bool:
    """Return whether a job still ends after a requeue: Slurm shows no PreemptTime of a job that waits for its start.

    Args:
        job: the fields of ``scontrol show job``.
    """
    return job.get("JobState") == "COMPLETING" and "PreemptTime" not in job


def keeps_running(job: Mapping[str, str]) -> bool:
    """Return whether a job runs and is not in the grace time of a preemption.

    Args:
        job: the fields of ``scontrol show job``.
    """
    return job.get("JobState") == "RUNNING" and job.get("PreemptTime", "None") == "None"


def moment_of(text: str | None) -> float | None:
    """Return a time that Slurm writes, such as SubmitTime, in seconds since the epoch; None for any other text."""
    if text is None:
        return None
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None


def end_time_of(job: Mapping[str, str] | None, environment: Mapping[str, str], *, now: float) -> float | None:
    """Return when a job's time is over, in seconds since the epoch; None without a limit, or if unknown.

    A run in an allocation ends with its own time limit or with the allocation, whichever comes first.

    Args:
        job: what Slurm says about the job, or about the allocation; None without an answer.
        environment: the batch script's environment.
        now: seconds since the epoch.
    """
    own_limit_s = environment.get("SUBMITIT_LOCAL_TIMEOUT_S")
    end_by_own_limit = None
    if own_limit_s and int(own_limit_s) < NO_LIMIT_S:
        end_by_own_limit = now + float(own_limit_s)
    if job is None:
        end_in_environment = environment.get("SLURM_JOB_END_TIME")
        return float(end_in_environment) if end_in_environment else end_by_own_limit
    end_by_slurm = None
    if job.get("TimeLimit") != "UNLIMITED":
        end_by_slurm = moment_of(job.get("EndTime"))
    if allocation_of(environment) is None or end_by_own_limit is None:
        return end_by_slurm
    if end_by_slurm is None:
        return end_by_own_limit
    return min(end_by_slurm, end_by_own_limit)


def ask_end(job_id: str) -> KnownEnd | None:
    """Ask Slurm once for the end of a job that runs; None without an answer, and if the job is being ended.

    A preempted job in its grace time is being ended too: Slurm shows the end of the grace time, and its signal says so.
    """
    now = time.time()
    try:
        job = commands.show_job(job_id)
    except commands.SlurmCommandError:
        return None
    if job is None or not keeps_running(job):
        return None
    end_time = end_time_of(job, {}, now=now)
    if end_time is None and job.get("TimeLimit") != "UNLIMITED":
        return None
    return KnownEnd(end_time=end_time, time=now)
