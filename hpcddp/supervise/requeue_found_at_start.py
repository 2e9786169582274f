"""Record a requeue that Slurm made by itself, at the start that follows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from hpcddp.jobfile.job import JobSpec
from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.events import Event, append_event, requeue_event
from hpcddp.run.failure import cause_in_log
from hpcddp.run.files import exists
from hpcddp.run.job_records import Start, read_program_end, read_start
from hpcddp.slurm.hostlist import HostListError
from hpcddp.slurm.job import moment_of
from hpcddp.stop.reasons import Cause
from hpcddp.supervise.budgets import is_interruption, record_progress
from hpcddp.supervise.lost_nodes import lost_nodes

# Slurm signals the tasks, and kills those that have not ended some seconds later.
_SIGNALLED: Final = frozenset({Cause.REQUEUED, Cause.PREEMPTION})
_NODE_MAY_BE_LOST: Final = frozenset({Cause.REQUEUED, Cause.NODE_FAILURE})


def cause_of_requeue(attempt: AttemptDirectory, events: Sequence[Event], *, tasks: int) -> Cause:
    """Return why the job of an attempt was requeued, as its records show it.

    Args:
        attempt: the attempt before the requeue.
        events: the events of the run.
        tasks: tasks of the job.
    """
    requeue = requeue_event(events, attempt.number)
    if requeue is not None:
        return requeue.known_cause
    # A program can requeue its job itself, after which Slurm no longer shows the preemption.
    if read_program_end(attempt, tasks=tasks).preempted:
        return Cause.PREEMPTION
    newest_cause = Cause.REQUEUED
    for event in events:
        if event.attempt == attempt.number and event.cause:
            newest_cause = event.known_cause
    if newest_cause is Cause.REQUEUED:
        return cause_in_log(attempt) or Cause.REQUEUED
    return newest_cause


def record_requeue(
    attempt: AttemptDirectory, start: Start, events: Sequence[Event], *, cause: Cause, spec: JobSpec
) -> None:
    """Record that Slurm requeued the job of an attempt, unless the end of that attempt has recorded it.

    Args:
        attempt: the attempt before the requeue.
        start: the start after it.
        events: the events of the run.
        cause: why the job was requeued.
    """
    if requeue_event(events, attempt.number) is not None:
        return
    if spec.command is not None:
        record_progress(attempt, now=start.time, interrupted=is_interruption(cause))
    facts: dict[str, Any] = {}
    if cause in _SIGNALLED and not _has_recorded_its_end(attempt, events, spec):
        facts["killed"] = True
    if cause in _NODE_MAY_BE_LOST:
        lost_hosts = _lost_batch_host(attempt)
        if lost_hosts:
            facts["node_faults"] = dict.fromkeys(lost_hosts, "lost")
    by = "slurm"
    if cause is Cause.REQUEUED and exists(attempt.requeue_request):
        by = "user"
    append_event(
        attempt.run.events,
        kind="requeue",
        time=_requeue_time(start, events),
        attempt=attempt.number,
        reason="Slurm requeued the job on its own",
        cause=str(cause),
        job_id=start.job_id,
        by=by,
        found_at_start=True,
        **facts,
    )


def _lost_batch_host(attempt: AttemptDirectory) -> list[str]:
    """Return the host of the batch script, which has recorded no end, if it was lost; the name in a list, or none."""
    start = read_start(attempt)
    if start is None:
        return []
    try:
        return lost_nodes({"SLURM_JOB_NODELIST": start.host}, tasks_per_node=1, recorded=[], started_at=start.time)
    except HostListError:
        # The record is damaged.
        return []


def _has_recorded_its_end(attempt: AttemptDirectory, events: Sequence[Event], spec: JobSpec) -> bool:
    """Return whether the tasks of an attempt have recorded their end, as far as that can be read."""
    if spec.command is not None:
        return read_program_end(attempt, tasks=spec.tasks).is_complete
    return any(event.attempt == attempt.number and event.kind in {"stop", "failure"} for event in events)


def _requeue_time(start: Start, events: Sequence[Event]) -> float:
    """Return when Slurm requeued the job, in seconds since the epoch: after all events, and before the start."""
    # Slurm renews the submit time when it requeues a job, and may start the job minutes later.
    requeue_time = moment_of(start.submit_time)
    if requeue_time is None:
        return start.time
    last_event = max((event.time for event in events), default=0.0)
    return min(start.time, max(last_event, requeue_time))
