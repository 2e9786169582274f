"""Which state a run is in: by its files first, then by what Slurm or this machine says of its job."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from hpcddp.report.states import State, state_in_slurm, state_of_result
from hpcddp.report.traces import Job, Traces
from hpcddp.run.directory import RunDirectory
from hpcddp.slurm.queue import QueuedJob

_SLURM_TIME: Final = "%Y-%m-%dT%H:%M:%S"
# The clocks of two hosts, and a controller that takes its time.
_SAME_SUBMISSION_S: Final = 300.0
# Hosts may write the same moment in different time zones, which lie quarters of an hour apart.
_ZONES_APART_S: Final = 900
_FARTHEST_ZONES_S: Final = 26 * 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What was asked once for all runs.

    Args:
        jobs: the jobs that Slurm knows, by id; None if it could not be asked.
        processes: whether the processes of local runs are there, by run; None for one of another machine.
    """

    jobs: Mapping[str, QueuedJob] | None = None
    processes: Mapping[RunDirectory, bool | None] = field(default_factory=dict)


def state_of(traces: Traces, answers: Answers) -> State:
    """Return the state of a run.

    Args:
        traces: what its files say. What they hold is final; a run that has finished has, whatever Slurm says.
        answers: what was asked.
    """
    if traces.result is not None:
        return state_of_result(str(traces.result.get("status")), traces.cause)
    if traces.job is None:
        return State.UNKNOWN
    if traces.job.local:
        alive = answers.processes.get(traces.run)
        if alive is None:
            return State.UNKNOWN
        return _at_work(traces) if alive else State.LOST
    if answers.jobs is None:
        return State.UNKNOWN
    job = queued(traces, answers)
    return _without_job(traces) if job is None else _with_job(traces, job)


def queued(traces: Traces, answers: Answers) -> QueuedJob | None:
    """Return what Slurm says of a run's job, or None if it has forgotten it, or uses its id for another one."""
    if traces.job is None or traces.job.local or answers.jobs is None:
        return None
    job = answers.jobs.get(traces.job.job_id)
    return job if job is not None and _is_same(traces.job, job) else None


def _is_same(known: Job, job: QueuedJob) -> bool:
    """Return whether Slurm's job is the run's: ids come again after a cluster was rebuilt."""
    start = known.start
    if start is not None and start.get("submit_time") is not None:
        # Slurm renews the submit time at a requeue.
        later = job.restarts > int(start["restart_count"])
        return later or _same_time(start["submit_time"], job.submit_time)
    if known.submitted is None:
        return True
    submitted = _seconds(job.submit_time)
    if submitted is None:
        return True
    early = submitted < known.submitted - _SAME_SUBMISSION_S
    late = submitted > known.submitted + _SAME_SUBMISSION_S and not job.restarts
    return not early and not late


def _same_time(one: str, other: str) -> bool:
    if one == other:
        return True
    first, second = _seconds(one), _seconds(other)
    if first is None or second is None:
        return True
    apart = abs(first - second)
    return apart <= _FARTHEST_ZONES_S and apart % _ZONES_APART_S == 0


def _seconds(text: str) -> float | None:
    try:
        return time.mktime(time.strptime(text, _SLURM_TIME))
    except ValueError:
        return None


def _with_job(traces: Traces, job: QueuedJob) -> State:
    state = state_in_slurm(job)
    start = traces.start
    if state is State.PENDING:
        return State.PENDING if start is None else State.REQUEUED
    if state not in {State.RUNNING, State.STOPPING}:
        return state
    if start is None or job.restarts > int(start["restart_count"]):
        # The script of this life of the job has not begun.
        return State.STARTING if state is State.RUNNING else State.REQUEUED if start is not None else state
    doing = _at_work(traces)
    return doing if doing is State.REQUEUED or state is State.RUNNING else State.STOPPING


def _without_job(traces: Traces) -> State:
    """Return what became of a run that Slurm has forgotten: only what the run's user did is still known."""
    if any(event.get("cause") == "cancelled" for event in traces.events[-1:]):
        return State.CANCELLED
    return State.LOST


def _at_work(traces: Traces) -> State:
    """Return what the tasks of a live job do."""
    if traces.start is None:
        return State.STARTING
    if traces.of_attempt("requeue"):
        return State.REQUEUED
    if traces.of_attempt("stop") or traces.of_attempt("signal") or traces.of_attempt("failure"):
        return State.STOPPING
    return State.RUNNING if _trains(traces) else State.STARTING


def _trains(traces: Traces) -> bool:
    """Return whether the newest attempt has begun its work."""
    # A program of the user's own has no number of steps, and says no word when it begins.
    if traces.of_attempt("train") or (traces.met and traces.total_steps is None):
        return True
    # A long run's first events may be out of sight.
    began = float((traces.start or {"time": 0.0})["time"])
    return traces.progress is not None and traces.progress.time >= began


def needs_slurm(traces: Traces) -> bool:
    """Return whether only Slurm can tell what a run does."""
    return traces.result is None and traces.job is not None and not traces.job.local


def needs_process(traces: Traces) -> bool:
    """Return whether only the machine that a run was started on can tell what it does."""
    return traces.result is None and traces.job is not None and traces.job.local
