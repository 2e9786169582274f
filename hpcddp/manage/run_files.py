"""Read the contents of a run directory, without a query to Slurm."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final, TypeVar

from hpcddp.run.directory import AttemptDirectory, RunDirectory
from hpcddp.run.events import Event, EventKind, read_event_log
from hpcddp.run.files import TAIL_BYTES, exists, open_regular, why_unreadable
from hpcddp.run.job_records import Change, Start, SubmissionRecord, newest_start, read_ranks, read_submission
from hpcddp.run.metrics import MetricsLine, read_metrics
from hpcddp.run.plan import read_plan
from hpcddp.run.record import Lines, RecordError, RecordT
from hpcddp.run.result import FINISHED, Result, read_result

# submission.json is written a moment after the job was submitted, in which the job may start; clocks differ too.
_SAME_SUBMISSION_S: Final = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The newest job of a run.

    Args:
        job_id: Slurm's id, or the process id of a run on this machine.
        local: whether it is a process on some host.
        submitted: when the run was submitted, in seconds since the epoch; None if by hand.
        start: the start of the newest attempt if this job has begun it, else None.
        host: the submitting host; None if by hand, and for an element that begins in the job of its sweep.
    """

    job_id: str
    local: bool = False
    submitted: float | None = None
    start: Start | None = None
    host: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """The contents of a run directory.

    Args:
        run: its directory; an element of a sweep that has not begun has none yet.
        job: its newest job; None if unknown.
        attempt: the newest attempt; None before the first.
        result: the result of the run; None while it has not ended for good.
        events: the last of its events.
        total_steps: of the whole run; None if unknown.
        progress: how far it is; None before the first step, or if it writes no metrics.
        met: whether all ranks of the newest attempt have met.
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
    met: bool = False
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
        """When the last activity was, in seconds since the epoch."""
        times = [event.time for event in self.events[-1:]]
        return max([*times, *([self.progress.time] if self.progress else [])], default=None)


def read_run_files(run: RunDirectory, *, job: Job | None = None) -> RunFiles:
    """Return the contents of a run directory; of one that is closed to this user, only a sentence about it.

    Args:
        run: its directory; it need not exist.
        job: its job, where no file of its own names one yet.
    """
    try:
        return _read_run_files(run, job)
    except OSError as error:
        sentence = f"{error.filename or run.path} cannot be read ({why_unreadable(error)})"
        return RunFiles(run=run, job=job, damaged=(sentence,), is_job_known=False)


def _read_run_files(run: RunDirectory, job: Job | None) -> RunFiles:
    attempt = run.newest_attempt()
    start, start_damage = readable(lambda: newest_start(run))
    submission, submission_damage = readable(lambda: read_submission(run))
    result, result_damage = readable(lambda: read_result(run))
    ranks, ranks_damage = (None, None) if attempt is None else readable(lambda: read_ranks(run.attempt(attempt)))
    of_job = tuple(damage for damage in (submission_damage, start_damage, result_damage) if damage is not None)
    events, events_damage = readable_lines(run.events, lambda: read_event_log(run.events, TAIL_BYTES))
    metrics, metrics_damage = readable_lines(run.metrics, lambda: read_metrics(run.metrics, _TAIL_BYTES))
    plan, plan_damage = readable(lambda: read_plan(run))
    of_rest = (ranks_damage, plan_damage, events_damage, metrics_damage)
    damaged = (*of_job, *(damage for damage in of_rest if damage is not None))
    began = 0.0 if start is None else start.time
    return RunFiles(
        run=run,
        job=_job(submission, start) or job,
        attempt=attempt,
        result=result,
        events=events,
        total_steps=None if plan is None else plan.total_steps,
        progress=progress_of(metrics, since=began, written=time_written(run.metrics) if metrics else 0.0),
        met=ranks is not None or ranks_damage is not None,
        damaged=damaged,
        is_job_known=not of_job,
        is_result_damaged=result_damage is not None,
        starts_over=None if attempt is None or (result and result.status == FINISHED) else starts_over(run, attempt),
        changes=() if submission is None else submission.changes,
    )


_ATTEMPTS_COMPARED: Final = 3
_HEAD_BYTES: Final = 64 * 1024
_LOSSES_COMPARED: Final = 3
# "loss 2.3010", "Loss: 6.9078e+00", "{'train_loss': 2.3010}"; fewer digits could be equal by chance.
_LOSS: Final = re.compile(r"loss\b['\"]?\s*[:=]?\s*([0-9]+\.[0-9]{3,}(?:e[-+]?[0-9]+)?)", re.ASCII | re.IGNORECASE)


def starts_over(run: RunDirectory, newest: int) -> str | None:
    """Return a sentence if the program of a command printed the same first losses in each of its last three attempts.

    A program that had resumed would have another loss. Nothing shows that a program began again if it prints no loss,
    or if its first losses differ from one start to the next because it sets no seed.

    Args:
        run: the run.
        newest: its newest attempt.
    """
    if newest + 1 < _ATTEMPTS_COMPARED:
        return None
    numbers = range(newest + 1 - _ATTEMPTS_COMPARED, newest + 1)
    printed = {tuple(first_losses(run.attempt(number))) for number in numbers}
    losses = next(iter(printed))
    if len(printed) > 1 or len(set(losses)) < _LOSSES_COMPARED:
        return None
    return (
        f"run {run.run_id} probably starts over in each attempt: attempts {numbers[0]} to {newest} printed the same "
        f"first losses ({', '.join(losses)}); how to resume: docs/any-script.md"
    )


def first_losses(attempt: AttemptDirectory) -> list[str]:
    """Return the first losses in the log of rank 0 of a command."""
    if not (exists(attempt.rank_exit_reserve(0)) or exists(attempt.rank_exit(0))):
        return []
    with suppress(OSError), open_regular(attempt.rank_log(0)) as (stream, _):
        text = stream.read(_HEAD_BYTES).decode("utf-8", errors="replace")
        return [match[1] for match in islice(_LOSS.finditer(text), _LOSSES_COMPARED)]
    return []


T = TypeVar("T")


def readable(read: Callable[[], T | None]) -> tuple[T | None, str | None]:
    """Return a record, or None and why it cannot be read: the other files must still be shown."""
    try:
        return read(), None
    except RecordError as error:
        return None, error.message


def readable_lines(path: Path, read: Callable[[], Lines[RecordT]]) -> tuple[tuple[RecordT, ...], str | None]:
    """Return the lines of a log that can be read, and a sentence about the others, or None."""
    lines, damage = readable(read)
    if lines is None:
        return (), damage
    if exists(path) and not path.is_file():
        return (), f"{path} is not a regular file, so nothing is read from it; move it away"
    return lines.records, lines.sentence(path)


def _job(submission: SubmissionRecord | None, start: Start | None) -> Job | None:
    """Return the newest job: that of the submission, or one whose script was submitted by hand later."""
    if submission is None:
        return _by_hand(start)
    begun = start is not None and start.time >= submission.time - _SAME_SUBMISSION_S
    mine = begun and start is not None and start.job_id == submission.job_id
    if start is not None and not mine and start.time > submission.time:
        return _by_hand(start)
    return Job(
        job_id=submission.job_id,
        local=submission.cluster != "slurm",
        submitted=submission.time,
        start=start if mine else None,
        host=submission.host,
    )


def _by_hand(start: Start | None) -> Job | None:
    if start is None or start.job_id is None:
        return None
    return Job(job_id=start.job_id, start=start)


# Some eighty steps: enough for a mean, and quick for hundreds of runs.
_TAIL_BYTES: Final = 16 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """How far a run is.

    Args:
        step: optimizer steps done.
        loss: ``loss`` of the last step, or ``train_loss``, ``train/loss``; None where it was not finite, or not logged.
        samples_per_s: over the last steps, evaluations and saves included; that of the last step if they are too few.
        steps_per_s: the same in steps.
        time: when the last step was made, in seconds since the epoch.
    """

    step: int
    loss: float | None
    samples_per_s: float | None
    steps_per_s: float | None
    time: float

    def eta_s(self, total_steps: int | None, now: float) -> float | None:
        """Return the seconds that are left at this speed; None if that is not known.

        Args:
            total_steps: of the whole run.
            now: seconds since the epoch.
        """
        if total_steps is None or not self.steps_per_s:
            return None
        return max(0.0, (total_steps - self.step) / self.steps_per_s - (now - self.time))


def time_written(path: Path) -> float:
    """Return when a file was written last, in seconds since the epoch; 0 without one."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


_LOSSES: Final = ("loss", "train_loss", "train/loss")


def progress_of(metrics: Sequence[MetricsLine], *, since: float = 0.0, written: float = 0.0) -> RunProgress | None:
    """Return how far a run is, or None before its first step.

    Args:
        metrics: the last lines of its ``metrics.jsonl``.
        since: the speed is that of later steps only, in seconds since the epoch: when the newest attempt began.
        written: when the file was written last, in seconds since the epoch: the time of lines that have none.
    """
    # Code of the user's own may log what it likes, and an evaluation has no time of its own.
    known = (line for line in metrics if line.time is not None or not line.evaluations())
    found = [(line, written if line.time is None else line.time) for line in known]
    name = next((name for name in _LOSSES if any(name in line.facts for line, _ in found)), _LOSSES[0])
    lines = [(line, moment) for line, moment in found if name in line.facts] or found
    if not lines:
        return None
    last, moment = lines[-1]
    samples_per_s, steps_per_s = _speed([(line, moment) for line, moment in lines if moment >= since])
    return RunProgress(
        step=last.step,
        loss=last.number(name),
        samples_per_s=samples_per_s,
        steps_per_s=steps_per_s,
        time=moment,
    )


# The steps of a block, 50 ms together, are recorded at the same moment.
_SHORTEST_S: Final = 0.25


def _speed(lines: Sequence[tuple[MetricsLine, float]]) -> tuple[float | None, float | None]:
    """Return samples and steps per second, evaluations and saves between them included."""
    if not lines:
        return None, None
    (first, began), (last, ended) = lines[0], lines[-1]
    seconds = ended - began
    if seconds < _SHORTEST_S:
        return last.number("samples_per_s"), None
    steps_per_s = (last.step - first.step) / seconds if last.step > first.step else None
    before, after = first.number("samples_seen"), last.number("samples_seen")
    if before is None or after is None:
        return last.number("samples_per_s"), steps_per_s
    return (after - before) / seconds, steps_per_s
