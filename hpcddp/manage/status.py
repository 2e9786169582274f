"""The state of runs, from their files and one query to Slurm for all of them."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from hpcddp.manage.run_files import Job, Traces, read_traces
from hpcddp.run.directory import RunDirectory
from hpcddp.run.job_records import known_hosts
from hpcddp.slurm.commands import QueuedJob, SlurmCommandError
from hpcddp.slurm.job import JOB_STATES, JobState
from hpcddp.stop.reasons import Cause


class State(StrEnum):
    """The state of a run."""

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
    """It left no result, and nobody can be asked; or its result cannot be read."""

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


# What Slurm takes for the end of a job without a limit is a year away (slurm.h, YEAR_SECONDS).
_UNLIMITED_S: Final = 360 * 24 * 3600.0
Ask = Callable[[], Sequence[QueuedJob]]
"""Asks Slurm for the user's jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """A run at one moment.

    Args:
        traces: what its files say.
        state: its state.
        job: its job in Slurm; None if Slurm does not know it, or was not asked.
        now: the moment, in seconds since the epoch.
    """

    traces: Traces
    state: State
    job: QueuedJob | None
    now: float

    @property
    def run(self) -> RunDirectory:
        """Its directory."""
        return self.traces.run

    @property
    def step(self) -> int | None:
        """Optimizer steps done; None where the run tells of none."""
        result, progress = self.traces.result, self.traces.progress
        saved = [event.step or 0 for event in self.traces.events if event.kind == "save"]
        known = [result.steps if result else None, progress.step if progress else None, max(saved, default=None)]
        return next((step for step in known if step is not None), None)

    @property
    def eta_s(self) -> float | None:
        """Seconds until its last step, for one that makes steps now."""
        progress = self.traces.progress
        if self.state is not State.RUNNING or progress is None:
            return None
        return progress.eta_s(self.traces.total_steps, self.now)

    @property
    def used_s(self) -> float | None:
        """Seconds that the newest attempt has run, up to now or to its end."""
        start = self.traces.start
        if self.state.has_nodes and self.job is not None:
            return self.job.used_s
        if start is None or self.state is State.PENDING:
            return None
        ended = self.now if self.state.has_nodes else self.traces.ended
        return None if ended is None else max(0.0, ended - start.time)

    @property
    def limit_s(self) -> float | None:
        """Its job's time limit in seconds; None without one, or if it is not known."""
        if self.job is not None:
            return self.job.limit_s
        start = self.traces.start
        if start is None or start.end_time is None:
            return None
        # Slurm counts limits in minutes, and the attempt began a moment after its job.
        limit_s = round((start.end_time - start.time) / 60) * 60.0
        return limit_s if limit_s < _UNLIMITED_S else None

    @property
    def hosts(self) -> Sequence[str] | None:
        """The hosts of the newest attempt; None before its ranks have met."""
        if self.traces.attempt is None:
            return None
        hosts = known_hosts(self.run.attempt(self.traces.attempt))
        return None if hosts is None else list(dict.fromkeys(hosts))

    @property
    def nodes(self) -> int | None:
        """How many nodes it has, had last, or wants."""
        if self.job is not None and self.job.nodes:
            return self.job.nodes
        hosts = self.hosts
        if hosts is None:
            return None if self.traces.start is None else 1
        return len(hosts)

    def as_json(self) -> dict[str, Any]:
        """Return the document that ``--json`` prints."""
        traces, progress, job = self.traces, self.traces.progress, self.traces.job
        return {
            "run_id": self.run.run_id,
            "name": self.run.path.parent.name,
            "run_dir": str(self.run.path),
            "state": str(self.state),
            "job_id": None if job is None else job.job_id,
            "cluster": None if job is None else "local" if job.local else "slurm",
            "slurm_state": None if self.job is None else self.job.state,
            "slurm_reason": None if self.job is None else self.job.reason,
            "attempt": traces.attempt,
            "step": self.step,
            "total_steps": traces.total_steps,
            "loss": None if progress is None else progress.loss,
            "samples_per_s": None if progress is None else progress.samples_per_s,
            "eta_s": self.eta_s,
            "nodes": self.nodes,
            "hosts": self.hosts,
            "used_s": self.used_s,
            "limit_s": self.limit_s,
            "result": None if traces.result is None else traces.result.as_json(),
            **({"damaged": list(traces.damaged)} if traces.damaged else {}),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Statuses:
    """What runs are doing.

    Args:
        runs: each run, in the order in which they were asked for.
        unanswered: why Slurm could not be asked, a sentence; None if it was, or did not have to be.
    """

    runs: tuple[RunStatus, ...]
    unanswered: str | None = None


def statuses(found: Iterable[Traces], *, ask: Ask, now: float) -> Statuses:
    """Return what runs are doing. Slurm is asked once at most, and only if one of them needs it.

    Args:
        found: what the files of the runs say.
        ask: asks Slurm.
        now: seconds since the epoch.
    """
    everything = list(found)
    jobs: dict[str, QueuedJob] | None = None
    unanswered = None
    if any(map(needs_slurm, everything)):
        try:
            jobs = {job.job_id: job for job in ask()}
        except SlurmCommandError as error:
            unanswered = error.message
    local = [traces for traces in everything if needs_process(traces)]
    answers = Answers(jobs=jobs, processes={traces.run: is_there(traces) for traces in local})
    return Statuses(runs=tuple(_status(traces, answers, now) for traces in everything), unanswered=unanswered)


def _status(traces: Traces, answers: Answers, now: float) -> RunStatus:
    state = state_of(traces, answers)
    if traces.result is None and not state.is_alive:
        # It may have come to its end between the two looks.
        again = read_traces(traces.run, job=traces.job)
        traces = traces if again.attempt is None and again.result is None else again
        state = state_of(traces, answers)
    return RunStatus(traces=traces, state=state, job=queued(traces, answers), now=now)


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
        return state_of_result(traces.result.status, traces.cause)
    state = _state_of_job(traces, answers)
    # It has left a result, which nobody can read.
    return State.UNKNOWN if state is State.LOST and traces.is_result_damaged else state


def _state_of_job(traces: Traces, answers: Answers) -> State:
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
    if start is not None and start.submit_time is not None:
        # Slurm renews the submit time at a requeue.
        later = job.restarts > start.restart_count
        return later or _same_time(start.submit_time, job.submit_time)
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
    if start is None or job.restarts > start.restart_count:
        # The script of this life of the job has not begun.
        return State.STARTING if state is State.RUNNING else State.REQUEUED if start is not None else state
    doing = _at_work(traces)
    return doing if doing is State.REQUEUED or state is State.RUNNING else State.STOPPING


def _without_job(traces: Traces) -> State:
    """Return what became of a run that Slurm has forgotten: only what the run's user did is still known."""
    if any(event.cause == Cause.CANCELLED for event in traces.events[-1:]):
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
    began = 0.0 if traces.start is None else traces.start.time
    return traces.progress is not None and traces.progress.time >= began


def needs_slurm(traces: Traces) -> bool:
    """Return whether only Slurm can tell what a run does."""
    return traces.result is None and traces.job is not None and not traces.job.local


def needs_process(traces: Traces) -> bool:
    """Return whether only the machine that a run was started on can tell what it does."""
    return traces.result is None and traces.job is not None and traces.job.local


def is_there(traces: Traces, *, proc: Path = Path("/proc"), host: str | None = None) -> bool | None:
    """Return whether a local run's script runs; None if it was started on another machine.

    Args:
        traces: what the run's files say.
        proc: where the kernel shows processes (proc(5)).
        host: this machine's name; None asks for it.
    """
    if traces.job is None:
        return None
    start = traces.start
    if start is not None and start.host != (host or socket.gethostname()):
        return None
    try:
        words = (proc / traces.job.job_id / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    # A process id comes again: the process must be the run's script.
    return str(traces.run.script).encode() in words
