"""Read the contents of a run directory, without a query to Slurm."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from hpcddp.manage.run_progress import RunProgress, progress_of, time_written
from hpcddp.manage.starts_over import starts_over
from hpcddp.run.directory import RunDirectory
from hpcddp.run.events import RECENT_BYTES, Event, EventKind, read_event_log, read_events
from hpcddp.run.files import TAIL_BYTES, exists, is_empty, why_unreadable
from hpcddp.run.job_records import Change, Start, SubmissionRecord, newest_start, read_plan, read_ranks, read_submission
from hpcddp.run.metrics import read_metrics
from hpcddp.run.record import Lines, RecordError, RecordT
from hpcddp.run.result import FINISHED, Result, read_result

# submission.json is written a moment after the job was submitted, in which the job may start; clocks differ too.
_SAME_SUBMISSION_S: Final = 300.0
# Some eighty steps: enough for a mean, and quick for hundreds of runs.
_METRICS_TAIL_BYTES: Final = 16 * 1024

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The newest job of a run.

    Args:
        job_id: Slurm's id, or the process id of a run on this machine.
        cluster: where it went: ``slurm``, or, as a process on some host, ``local`` or ``here``.
        submitted: when the run was submitted, in seconds since the epoch; None if by hand.
        start: the start of the newest attempt if this job, or one before it in its chain, has begun it, else None.
        chain: the ids of all jobs of its chain, in their order; empty for one job.
        chain_option: the option of scancel that selects all of these, wherever the run directory is now; or empty.
        host: the submitting host; None if by hand, and for an element that begins in the job of its sweep.
    """

    job_id: str
    cluster: str = "slurm"
    submitted: float | None = None
    start: Start | None = None
    chain: tuple[str, ...] = ()
    chain_option: str = ""
    host: str | None = None

    @property
    def local(self) -> bool:
        """Whether it is a process on some host."""
        return self.cluster != "slurm"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """The contents of a run directory.

    Args:
        run: its directory; an element of a sweep that has not begun has none yet.
        job: its newest job; None if unknown.
        attempt: the number of the newest attempt; None before the first.
        result: the result of the run; None while it has not ended for good.
        events: the last of its events.
        total_steps: of the whole run; None if unknown.
        progress: how far it is; None before the first step, or if it writes no metrics.
        hosts: the host of each rank of the newest attempt; None before all ranks have met, empty if their record is
            damaged.
        damaged: a sentence for each of its records that cannot be read.
        is_job_known: whether no damaged record is about its job or its result.
        is_result_damaged: whether its result is there and cannot be read.
        starts_over: a sentence if its program starts over in each attempt; None if it does not, or nothing shows it.
        changes: how resumptions have changed its training, in their order.
    """

    run: RunDirectory
    job: Job | None
    attempt: int | None = None
    result: Result | None = None
    events: tuple[Event, ...] = ()
    total_steps: int | None = None
    progress: RunProgress | None = None
    hosts: tuple[str, ...] | None = None
    damaged: tuple[str, ...] = ()
    is_job_known: bool = True
    is_result_damaged: bool = False
    starts_over: str | None = None
    changes: tuple[Change, ...] = ()

    @property
    def remarks(self) -> tuple[str, ...]:
        """What its user should know besides its state, a sentence each."""
        return self.damaged if self.starts_over is None else (*self.damaged, self.starts_over)

    @property
    def start(self) -> Start | None:
        """The start of the newest attempt, if the run's job has begun it."""
        return None if self.job is None else self.job.start

    def of_attempt(self, kind: EventKind) -> list[Event]:
        """Return the events of one kind of the newest attempt."""
        return [event for event in self.events if event.kind == kind and event.attempt == self.attempt]

    @property
    def cause(self) -> str | None:
        """Why the last attempt ended, the value of a ``Cause``; None if unknown."""
        return next((event.cause for event in reversed(self.events) if event.cause), None)

    @property
    def ended(self) -> float | None:
        """When the last activity was, in seconds since the epoch; None if none is known."""
        times = [event.time for event in self.events[-1:]]
        if self.progress is not None:
            times.append(self.progress.time)
        return max(times, default=None)


def record_or_damage(read: Callable[[], T | None]) -> tuple[T | None, str | None]:
    """Return a record, or None and why it cannot be read: the other files must still be shown."""
    try:
        return read(), None
    except RecordError as error:
        return None, error.message


class RecordReader:
    """Reads records of a run, and collects a sentence about each that cannot be read: the others must still be shown.

    Args:
        damage: the sentences that are known already.
    """

    def __init__(self, damage: Iterable[str] = ()) -> None:
        # The keys are the sentences, each once, in their order.
        self.damage: dict[str, None] = dict.fromkeys(damage)

    def read(self, read_record: Callable[[], T | None]) -> T | None:
        """Return a record; None if it does not exist, or cannot be read."""
        record, damage = record_or_damage(read_record)
        self.add(damage)
        return record

    def lines(self, path: Path, read_log: Callable[[], Lines[RecordT]]) -> tuple[RecordT, ...]:
        """Return the lines of a log that can be read."""
        lines = self.read(read_log)
        if lines is None:
            return ()
        if exists(path) and not path.is_file():
            self.add(f"{path} is not a regular file, so nothing is read from it; move it away")
            return ()
        self.add(lines.sentence(path))
        return lines.records

    def add(self, sentence: str | None) -> None:
        """Add a sentence; None if nothing is damaged."""
        if sentence is not None:
            self.damage[sentence] = None


def recent_events(run: RunDirectory) -> list[Event]:
    """Return the end of the event log of a run; nothing where it cannot be read, which its remarks tell."""
    events, _ = record_or_damage(lambda: read_events(run.events, RECENT_BYTES))
    return events or []


def closed_directory_sentence(run: RunDirectory, error: OSError) -> str:
    """Return a sentence about a run directory, or a part of it, that is closed to this user."""
    return f"{error.filename or run.path} cannot be read ({why_unreadable(error)})"


def read_run_files(run: RunDirectory, *, job: Job | None = None) -> RunFiles:
    """Return the contents of a run directory; of one that is closed to this user, only a sentence about it.

    Args:
        run: its directory; it need not exist.
        job: its job, where no file of its own names one yet; None without one.
    """
    try:
        return _read_run_files(run, job)
    except OSError as error:
        sentence = closed_directory_sentence(run, error)
        return RunFiles(run=run, job=job, damaged=(sentence,), is_job_known=False)


def _read_run_files(run: RunDirectory, job: Job | None) -> RunFiles:
    attempt = run.newest_attempt()
    reader = RecordReader()
    submission = reader.read(lambda: read_submission(run))
    start = reader.read(lambda: newest_start(run))
    result, result_damage = record_or_damage(lambda: read_result(run))
    reader.add(result_damage)
    is_job_known = not reader.damage
    hosts = None
    if attempt is not None:
        ranks, ranks_damage = record_or_damage(lambda: read_ranks(run.attempt(attempt)))
        reader.add(ranks_damage)
        if ranks is not None or ranks_damage is not None:
            hosts = tuple(rank.host for rank in ranks or ())
    plan = reader.read(lambda: read_plan(run))
    events = reader.lines(run.events, lambda: read_event_log(run.events, TAIL_BYTES))
    metrics = reader.lines(run.metrics, lambda: read_metrics(run.metrics, _METRICS_TAIL_BYTES))
    if is_empty(run.job_file):
        # The import is slow, and a whole one is not read here.
        from hpcddp.run.job_file import read_submitted_job

        reader.read(lambda: read_submitted_job(run))
    if is_empty(run.events):
        reader.add(f"{run.events} is damaged: it is empty; what happened before is not known")
    progress = None
    if metrics:
        attempt_began = 0.0 if start is None else start.time
        progress = progress_of(metrics, since=attempt_began, written=time_written(run.metrics))
    is_finished = result is not None and result.status == FINISHED
    starts_over_sentence = None
    if attempt is not None and not is_finished:
        starts_over_sentence = starts_over(run, attempt)
    return RunFiles(
        run=run,
        job=_newest_job(submission, start) or job,
        attempt=attempt,
        result=result,
        events=events,
        total_steps=None if plan is None else plan.total_steps,
        progress=progress,
        hosts=hosts,
        damaged=tuple(reader.damage),
        is_job_known=is_job_known,
        is_result_damaged=result_damage is not None,
        starts_over=starts_over_sentence,
        changes=() if submission is None else submission.changes,
    )


def _newest_job(submission: SubmissionRecord | None, start: Start | None) -> Job | None:
    """Return the newest job: that of the submission, or one whose script was submitted by hand later."""
    if submission is None:
        return _job_submitted_by_hand(start)
    start_of_submission = None
    job_id = submission.job_id
    if start is not None:
        is_recent = start.time >= submission.time - _SAME_SUBMISSION_S
        if is_recent and start.job_id in submission.job_ids:
            start_of_submission = start
            job_id = start.job_id
        elif start.time > submission.time:
            return _job_submitted_by_hand(start)
    chain_name = RunDirectory(Path(submission.run_dir)).name_of_chain
    return Job(
        job_id=job_id,
        cluster=submission.cluster,
        submitted=submission.time,
        start=start_of_submission,
        chain=submission.chain,
        chain_option=f"--name={chain_name}" if submission.chain else "",
        host=submission.host,
    )


def _job_submitted_by_hand(start: Start | None) -> Job | None:
    if start is None or start.job_id is None:
        return None
    return Job(job_id=start.job_id, start=start)
