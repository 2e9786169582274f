"""What a run's own files say of it. Nobody is asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hpcddp.report.progress import Progress, read_progress
from hpcddp.run.directory import RunDirectory
from hpcddp.run.tail import tail_records

# submission.json is written a moment after the job was submitted, in which the job may start; clocks differ too.
_SAME_SUBMISSION_S: Final = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The job that a run was given to last.

    Args:
        job_id: Slurm's id, or the process id of a run on this machine.
        local: whether it is a process on some machine.
        submitted: when the run was handed over, in seconds since the epoch; None if by hand.
        start: the ``start.json`` of the newest attempt if this job has begun it, else None.
    """

    job_id: str
    local: bool = False
    submitted: float | None = None
    start: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """What a run has left in its directory so far.

    Args:
        run: its directory; an element of a sweep that has not begun has none yet.
        job: the job that it was given to last; None if nothing says.
        attempt: the newest attempt; None before the first.
        result: ``result.json``.
        events: the last of its events.
        total_steps: of the whole run; None if not known.
        progress: how far it is; None before the first step, or if it writes no metrics.
        met: whether all ranks of the newest attempt have met.
    """

    run: RunDirectory
    job: Job | None
    attempt: int | None = None
    result: Mapping[str, Any] | None = None
    events: tuple[Mapping[str, Any], ...] = ()
    total_steps: int | None = None
    progress: Progress | None = None
    met: bool = False

    @property
    def start(self) -> Mapping[str, Any] | None:
        """The ``start.json`` of the newest attempt, if the run's job has begun it."""
        return None if self.job is None else self.job.start

    def of_attempt(self, kind: str) -> list[Mapping[str, Any]]:
        """Return the events of one kind of the newest attempt."""
        return [event for event in self.events if event["event"] == kind and event["attempt"] == self.attempt]

    @property
    def cause(self) -> str | None:
        """Why the last attempt ended, a ``Cause``'s word; None while nobody says."""
        return next((event["cause"] for event in reversed(self.events) if event.get("cause")), None)

    @property
    def ended(self) -> float | None:
        """When the last sign of life was, in seconds since the epoch."""
        times = [float(event["time"]) for event in self.events[-1:]]
        return max([*times, *([self.progress.time] if self.progress else [])], default=None)


def read_traces(run: RunDirectory, *, job: Job | None = None) -> Traces:
    """Return what a run has left.

    Args:
        run: its directory; it need not exist.
        job: the job that it was given to, where no file of its own says so yet.
    """
    attempt = run.newest_attempt()
    start = None if attempt is None else read_document(run.attempt(attempt).start)
    plan = read_document(run.plan) or {}
    began = 0.0 if start is None else float(start["time"])
    return Traces(
        run=run,
        job=_job(read_document(run.submission), start) or job,
        attempt=attempt,
        result=read_document(run.result),
        events=tuple(record for record in tail_records(run.events) if "event" in record),
        total_steps=plan.get("total_steps"),
        progress=read_progress(run.metrics, since=began),
        met=attempt is not None and run.attempt(attempt).ranks.exists(),
    )


def read_document(path: Path) -> dict[str, Any] | None:
    """Return the JSON document in a file; None if it is not there or cannot be read: others must still be told of."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def _job(submission: Mapping[str, Any] | None, start: Mapping[str, Any] | None) -> Job | None:
    """Return the newest job: the one that the run was handed to, or one whose script was submitted by hand later."""
    if submission is None:
        return _by_hand(start)
    submitted = submission.get("time")
    begun = start is not None and start["time"] >= (submitted or 0.0) - _SAME_SUBMISSION_S
    mine = begun and start is not None and start["job_id"] == submission["job_id"]
    if start is not None and not mine and start["time"] > (submitted or 0.0):
        return _by_hand(start)
    return Job(
        job_id=str(submission["job_id"]),
        local=submission["cluster"] == "local",
        submitted=submitted,
        start=start if mine else None,
    )


def _by_hand(start: Mapping[str, Any] | None) -> Job | None:
    if start is None or start["job_id"] is None:
        return None
    return Job(job_id=str(start["job_id"]), start=start)
