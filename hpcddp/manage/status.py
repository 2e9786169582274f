"""The state of runs, from their files and one query to Slurm for all of them."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, Final

from hpcddp.manage.format import duration_text
from hpcddp.manage.run_files import Job, RunFiles, read_run_files
from hpcddp.manage.run_progress import time_written
from hpcddp.processes import command_line
from hpcddp.run.directory import RunDirectory
from hpcddp.run.evaluations import Summary
from hpcddp.run.files import is_disk_full
from hpcddp.run.node_faults import excluded_nodes, failing_nodes
from hpcddp.run.ownership import processes_left, runs_script
from hpcddp.run.result import metrics_of
from hpcddp.slurm.commands import QueuedJob, SlurmCommandError
from hpcddp.slurm.job import ENDED_STATES, JOB_STATES, State, moment_of
from hpcddp.stop.reasons import Cause
from hpcddp.submission.turns import waits_for_turn

# The values of ``status`` in a result.
_RESULTS: Final = frozenset({State.FINISHED, State.FAILED, State.CANCELLED, State.STOPPED})
_HELD: Final = ("jobheld", "launch failed requeued held", "job requeued in held state")


def state_in_slurm(job: QueuedJob) -> State:
    """Return what the state of its job means for a run that has left no result."""
    job_state = JOB_STATES.get(job.state)
    if job_state is None:
        return State.UNKNOWN
    reason = job.reason.lower().replace("_", " ").strip("()")
    if job_state.run_state is State.PENDING and reason.startswith(_HELD):
        return State.HELD
    return job_state.run_state


def state_of_result(status: str, cause: str | None) -> State:
    """Return the state that a result means.

    Args:
        cause: why the last attempt ended, the value of a ``Cause``; None if unknown.
    """
    if status == State.STOPPED and cause == Cause.TIME_LIMIT:
        return State.TIMED_OUT
    if status == State.STOPPED and cause == Cause.PREEMPTION:
        return State.PREEMPTED
    if status in _RESULTS:
        return State(status)
    return State.UNKNOWN


_METRICS_SHOWN: Final = 6
# A run whose ranks have written nothing for that long is told so; many programs print once in an epoch only.
_SILENT_AFTER_S: Final = 30.0
# What Slurm takes for the end of a job without a limit is a year away (slurm.h, YEAR_SECONDS).
_UNLIMITED_S: Final = 360 * 24 * 3600.0
Ask = Callable[[], Sequence[QueuedJob]]
"""Asks Slurm for the user's jobs."""
Jobs = Mapping[str, QueuedJob] | None
"""The jobs that Slurm knows, by id; None if it could not be queried."""


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """A run at one moment.

    Args:
        files: the contents of its directory.
        job: its job in Slurm; None if Slurm does not know it, or was not queried.
        now: the moment, in seconds since the epoch.
    """

    files: RunFiles
    state: State
    job: QueuedJob | None
    now: float

    @property
    def run(self) -> RunDirectory:
        """Its directory."""
        return self.files.run

    @property
    def is_alive(self) -> bool:
        """Whether a job of it waits or runs."""
        return self.state.is_alive

    @property
    def step(self) -> int | None:
        """Optimizer steps done; None where the run records none."""
        if self.files.result is not None and self.files.result.steps is not None:
            return self.files.result.steps
        if self.files.progress is not None:
            return self.files.progress.step
        saved_steps = [event.step or 0 for event in self.files.events if event.kind == "save"]
        return max(saved_steps, default=None)

    @property
    def eta_s(self) -> float | None:
        """Seconds until its last step, for a run that is training and can record it."""
        progress = self.files.progress
        if self.state is not State.RUNNING or progress is None or self._cannot_record:
            return None
        return progress.eta_s(self.files.total_steps, self.now)

    @property
    def used_s(self) -> float | None:
        """Seconds that the newest attempt has run, up to now or to its end."""
        start = self.files.start
        if self.state.has_nodes and self.job is not None:
            return self.job.used_s
        if start is None or self.state is State.PENDING:
            return None
        ended = self.now if self.state.has_nodes else self.files.ended
        return None if ended is None else max(0.0, ended - start.time)

    @property
    def limit_s(self) -> float | None:
        """Its job's time limit in seconds; None without one, or if it is not known."""
        limit_s: float | None = None
        start = self.files.start
        if self.job is not None:
            limit_s = self.job.limit_s
        elif start is not None and start.end_time is not None:
            # Slurm counts limits in minutes, and the attempt began a moment after its job.
            limit_s = round((start.end_time - start.time) / 60) * 60
        if limit_s is None or limit_s >= _UNLIMITED_S:
            return None
        return limit_s

    @cached_property
    def metrics(self) -> Mapping[str, Summary]:
        """The last and the best value of each metric of the evaluations, by name; empty for a run that waits."""
        if self.files.result is not None:
            return self.files.result.metrics
        return metrics_of(self.run) if self.state.has_nodes else {}

    def metric_sentences(self) -> list[str]:
        """Return the best and the last value of each metric of the evaluations, in words; of many, the first few."""
        return [f"{name}: {summary.sentence}" for name, summary in islice(self.metrics.items(), _METRICS_SHOWN)]

    @cached_property
    def silent_s(self) -> float | None:
        """For how long a run that has nodes has no output, metrics or progress, in seconds.

        None if less than 30, or if a full disk takes none.
        """
        files = self.files
        start = files.start
        if self.state not in {State.STARTING, State.RUNNING} or files.attempt is None or start is None:
            return None
        if self._cannot_record:
            return None
        latest = max(start.time, time_written(self.run.metrics), time_written(self.run.progress))
        # The logs may be many: they are looked at only where nothing else is new.
        if self.now - latest >= _SILENT_AFTER_S:
            logs = self.run.attempt(files.attempt).rank_logs().values()
            latest = max([latest, *map(time_written, logs)])
        silent_s = self.now - latest
        return silent_s if silent_s >= _SILENT_AFTER_S else None

    @property
    def remarks(self) -> tuple[str, ...]:
        """What its user should know besides its state, a sentence each."""
        remarks = [*self.files.remarks]
        if self.state is not State.FINISHED:
            excluded = excluded_nodes(self.files.events)
            for node in failing_nodes(self.files.events, now=self.now):
                advice = "to keep requeued jobs away from it, write requeue.avoid_failed_nodes: true"
                if node.name in excluded:
                    advice = "its job is kept away from it"
                remarks.append(f"run {self.run.run_id}: node {node.name} {node.why}; {advice}")
        job = self.files.job
        if self.is_alive and job is not None and job.job_id in job.chain:
            remarks.append(
                f"run {self.run.run_id}: job {job.job_id} is number {job.chain.index(job.job_id) + 1} of the "
                f"{len(job.chain)} of its chain"
            )
        if self._cannot_record:
            remarks.append(
                f"run {self.run.run_id}: the disk of {self.run.path} is full, so that the run may be farther than its "
                "records, and cannot save; free space"
            )
        silent_s = self.silent_s
        if silent_s is not None:
            command = shlex.join(["hpcddp", "stacks", self.run.run_id])
            remarks.append(f"run {self.run.run_id}: no output for {duration_text(silent_s)} on any rank; see {command}")
        return tuple(remarks)

    @cached_property
    def _cannot_record(self) -> bool:
        """Whether it runs on a disk that is full."""
        return self.state.has_nodes and is_disk_full(self.run.path)

    @property
    def hosts(self) -> Sequence[str] | None:
        """The hosts of the newest attempt; None before its ranks have met, or if their record cannot be read."""
        return list(dict.fromkeys(self.files.hosts or ())) or None

    @property
    def nodes(self) -> int | None:
        """How many nodes it has, had last, or requests."""
        if self.job is not None and self.job.nodes:
            return self.job.nodes
        hosts = self.hosts
        if hosts is None:
            return None if self.files.start is None else 1
        return len(hosts)

    def as_json(self) -> dict[str, Any]:
        """Return the document that ``--json`` prints."""
        files = self.files
        progress = files.progress
        document = {
            "run_id": self.run.run_id,
            "name": self.run.name,
            "run_dir": str(self.run.path),
            "state": str(self.state),
            "job_id": None if files.job is None else files.job.job_id,
            "cluster": None if files.job is None else files.job.cluster,
            "slurm_state": None if self.job is None else self.job.state,
            "slurm_reason": None if self.job is None else self.job.reason,
            "attempt": files.attempt,
            "step": self.step,
            "total_steps": files.total_steps,
            "loss": None if progress is None else progress.loss,
            "samples_per_s": None if progress is None else progress.samples_per_s,
            "metrics": {name: summary.as_json() for name, summary in self.metrics.items()},
            "eta_s": self.eta_s,
            "nodes": self.nodes,
            "hosts": self.hosts,
            "used_s": self.used_s,
            "limit_s": self.limit_s,
            "silent_s": self.silent_s,
            "result": None if files.result is None else files.result.as_json(),
        }
        if files.changes:
            document["changes"] = [str(change) for change in files.changes]
        if files.damaged:
            document["damaged"] = list(files.damaged)
        if files.starts_over:
            document["starts_over"] = files.starts_over
        return document


@dataclass(frozen=True, slots=True, kw_only=True)
class Statuses:
    """The states of runs.

    Args:
        runs: each run, in the order of the request.
        unanswered: why Slurm could not be queried, a sentence; None if it was, or did not have to be.
    """

    runs: tuple[RunStatus, ...]
    unanswered: str | None = None


def statuses(files_of_runs: Iterable[RunFiles], *, ask: Ask, now: float) -> Statuses:
    """Return the states of runs. Slurm is queried once at most, and only if one of them needs it.

    Args:
        files_of_runs: the contents of the run directories.
        now: seconds since the epoch.
    """
    runs = list(files_of_runs)
    jobs: dict[str, QueuedJob] | None = None
    unanswered = None
    if any(files.result is None and files.job is not None and not files.job.local for files in runs):
        try:
            jobs = {job.job_id: job for job in ask()}
        except SlurmCommandError as error:
            unanswered = error.message
    return Statuses(runs=tuple(_status(files, jobs, now) for files in runs), unanswered=unanswered)


def _with_live_job(files: RunFiles, jobs: Jobs) -> RunFiles:
    """Return the contents of the directory of a run with the job of its chain that runs, or that waits first."""
    if files.result is None and files.job is not None and jobs is not None:
        for job_id in files.job.chain:
            if job_id in jobs and jobs[job_id].state not in ENDED_STATES:
                return replace(files, job=replace(files.job, job_id=job_id))
    return files


def _status(files: RunFiles, jobs: Jobs, now: float) -> RunStatus:
    files = _with_live_job(files, jobs)
    state = state_of(files, jobs)
    if files.result is None and not state.is_alive:
        # It may have ended since its files were read, before Slurm was asked.
        newer_files = read_run_files(files.run, job=files.job)
        if newer_files.attempt is not None or newer_files.result is not None:
            files = newer_files
        state = state_of(files, jobs)
    return RunStatus(files=files, state=state, job=_queued_job(files, jobs), now=now)


# The clocks of two hosts differ, and a controller may be slow.
_SAME_SUBMISSION_S: Final = 300.0
# Hosts may write the same moment in different time zones, which lie quarters of an hour apart.
_ZONES_APART_S: Final = 900
_FARTHEST_ZONES_S: Final = 26 * 3600


def state_of(files: RunFiles, jobs: Jobs) -> State:
    """Return the state of a run.

    Args:
        files: the contents of its directory. A result is final, whatever Slurm shows.
        jobs: the jobs that Slurm knows.
    """
    if files.result is not None:
        return state_of_result(files.result.status, files.cause)
    if files.is_result_damaged and any(event.kind == "finish" for event in files.events[-1:]):
        return State.FINISHED
    state = _state_of_job(files, jobs)
    return State.UNKNOWN if state is State.LOST and files.is_result_damaged else state


def _state_of_job(files: RunFiles, jobs: Jobs) -> State:
    if files.job is None:
        return State.UNKNOWN
    if files.job.local:
        return _state_with_process(files, files.job)
    if jobs is None:
        return State.UNKNOWN
    job = _queued_job(files, jobs)
    if job is not None:
        return _state_with_job(files, job)
    # Slurm does not know it: only a cancellation by its user is recorded.
    if any(event.cause == Cause.CANCELLED for event in files.events[-1:]):
        return State.CANCELLED
    return State.LOST


def _state_with_process(files: RunFiles, job: Job) -> State:
    """Return the state of a run whose script is a process on some machine."""
    host = job.host if files.start is None else files.start.host
    if host != socket.gethostname():
        return State.UNKNOWN
    words = command_line(job.job_id)
    if not runs_script(words):
        return State.LOST
    return State.PENDING if waits_for_turn(words) else _state_of_live_job(files)


def _queued_job(files: RunFiles, jobs: Jobs) -> QueuedJob | None:
    """Return what Slurm says of a run's job, or None if it has no record of it, or uses its id for another one."""
    if files.job is None or files.job.local or jobs is None:
        return None
    job = jobs.get(files.job.job_id)
    if job is None or not _is_job_of_run(files.job, job):
        return None
    return job


def _is_job_of_run(recorded: Job, job: QueuedJob) -> bool:
    """Return whether Slurm's job is the recorded one: a rebuilt cluster reuses job ids."""
    start = recorded.start
    if start is not None and start.job_id == recorded.job_id and start.submit_time is not None:
        # Slurm renews the submit time at a requeue.
        was_requeued = job.restarts > start.restart_count
        return was_requeued or _is_same_time(start.submit_time, job.submit_time)
    submitted = moment_of(job.submit_time)
    if recorded.submitted is None or submitted is None:
        return True
    is_earlier = submitted < recorded.submitted - _SAME_SUBMISSION_S
    is_later = submitted > recorded.submitted + _SAME_SUBMISSION_S
    return not is_earlier and not (is_later and job.restarts == 0)


def _is_same_time(first_text: str, second_text: str) -> bool:
    """Return whether two times of Slurm may be the same moment, written in the time zones of two hosts."""
    if first_text == second_text:
        return True
    first = moment_of(first_text)
    second = moment_of(second_text)
    if first is None or second is None:
        return True
    difference_s = abs(first - second)
    return difference_s <= _FARTHEST_ZONES_S and difference_s % _ZONES_APART_S == 0


def _state_with_job(files: RunFiles, job: QueuedJob) -> State:
    slurm_state = state_in_slurm(job)
    start = files.start
    if slurm_state is State.PENDING and start is not None:
        return State.REQUEUED
    if slurm_state not in {State.RUNNING, State.STOPPING}:
        return slurm_state
    if start is None or start.job_id != job.job_id or job.restarts > start.restart_count:
        # The script has not begun since the last requeue.
        if slurm_state is State.RUNNING:
            return State.STARTING
        return slurm_state if start is None else State.REQUEUED
    state = _state_of_live_job(files)
    if slurm_state is State.STOPPING and state is not State.REQUEUED:
        return State.STOPPING
    return state


def _state_of_live_job(files: RunFiles) -> State:
    """Return the state of a run whose job is alive, from its events."""
    if files.start is None:
        return State.STARTING
    if files.of_attempt("requeue"):
        return State.REQUEUED
    if files.of_attempt("stop") or files.of_attempt("signal") or files.of_attempt("failure"):
        return State.STOPPING
    # The first events of a long run may lie before the part that was read.
    has_progress = files.progress is not None and files.progress.time >= files.start.time
    # A program of the user's own has no number of steps.
    is_program = files.hosts is not None and files.total_steps is None
    if files.of_attempt("train") or is_program or has_progress:
        return State.RUNNING
    return State.STARTING


def left_behind(status: RunStatus) -> list[int]:
    """Return the processes that a batch script that was killed on this machine has left, by their ids.

    Not those of a run in an allocation: srun is one of them, and kills its tasks when it is signalled.
    """
    job = status.files.job
    start = status.files.start
    is_local = job is not None and job.local and start is not None and start.allocation is None
    return processes_left(status.run) if is_local and status.state is State.LOST else []
