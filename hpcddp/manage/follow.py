"""Follow a run by its files and the state of its job."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, Protocol

from hpcddp.errors import printable
from hpcddp.manage.format import step_text
from hpcddp.manage.overview import status_now
from hpcddp.manage.pending_reasons import pending_reason
from hpcddp.manage.status import RunStatus
from hpcddp.run.directory import RunDirectory
from hpcddp.run.events import Event
from hpcddp.run.files import GrowingFile, exists
from hpcddp.run.job_records import read_submission
from hpcddp.run.metrics import MetricsLine
from hpcddp.run.record import RecordT, parse_lines
from hpcddp.run.result import Result, read_result
from hpcddp.slurm import commands
from hpcddp.slurm.job import JOB_STATES, State

JobPhase = Literal["pending", "running", "ended"]
_POLL_S = 0.25
# How long a result may take to appear on a shared file system after the job has ended.
_RESULT_GRACE_S = 5.0


class Display(Protocol):
    """Shows the progress of a run."""

    def job(self, state: JobPhase, why: str | None = None) -> None:
        """Show that the job's state has changed, or why it waits, which is None where that is not known."""

    def output(self, line: str) -> None:
        """Show a line that the user's own program has printed."""

    def event(self, event: Event) -> None:
        """Show one line of ``events.jsonl``."""

    def step(self, record: MetricsLine) -> None:
        """Show one training record of ``metrics.jsonl``."""

    def evaluation(self, record: MetricsLine) -> None:
        """Show one evaluation record of ``metrics.jsonl``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a followed run ended.

    Args:
        status: ``finished``, ``failed``, ``cancelled``, ``stopped`` where it may be resumed, or ``lost`` when the job
            ended and left no result.
        result: its result, or None.
    """

    status: str
    result: Result | None

    @property
    def exit_code(self) -> int | None:
        """The run's own exit code (not the command line's), None without a result."""
        if self.status == "finished":
            return 0
        return None if self.result is None else self.result.exit_code


class Output(Protocol):
    """Reads the output of the user's own program."""

    def __call__(self, *, ended: bool) -> Iterable[str]:
        """Return the new lines; of a job that has ended, also a last line without a line break."""


class RecordReader(Generic[RecordT]):
    """Reads the records that are appended to a log; a damaged line is left out.

    Args:
        path: the log; it need not exist yet.
        kind: the type of its lines.
    """

    def __init__(self, path: Path, kind: type[RecordT]) -> None:
        self._file = GrowingFile(path)
        self._kind = kind

    def new_records(self) -> Iterator[RecordT]:
        """Yield the records on the complete lines that were appended since the last call."""
        for line in self._file.new_lines():
            yield from parse_lines(line, self._kind).records

    @property
    def replacements(self) -> int:
        """How often the log was replaced, and read from its beginning again."""
        return self._file.replacements


class _Follower:
    """Shows what is new in the files of a run."""

    def __init__(
        self,
        run: RunDirectory,
        display: Display,
        job_state: Callable[[], JobPhase],
        output: Output | None,
        waits_for: Callable[[], str | None],
        first_attempt: int,
    ) -> None:
        self._first_attempt = first_attempt
        # The metrics of earlier attempts are there already when a run is resumed.
        self._shows_metrics = first_attempt == 0
        self._run = run
        self._display = display
        self._job_state = job_state
        self._output = output
        self._events = RecordReader(run.events, Event)
        self._metrics = RecordReader(run.metrics, MetricsLine)
        self._waits_for = waits_for
        self._state: tuple[JobPhase, str | None] | None = None
        self._newest_step = self._newest_evaluation = self._replacements = 0
        self._shown_before = self._evaluated_before = 0
        self._gone_since: float | None = None

    def look(self) -> Outcome | None:
        """Show what is new; return how the run ended, or None while it runs."""
        # Queried first: after the job has ended the files are complete.
        now = self._job_state()
        if self._output is not None:
            # Before the lines on how the run ended.
            for line in self._output(ended=now == "ended"):
                self._display.output(line)
        state = (now, self._waits_for() if now == "pending" else None)
        if state != self._state:
            self._state = state
            self._display.job(*state)
        for event in self._events.new_records():
            if event.attempt >= self._first_attempt:
                self._display.event(event)
                if event.kind == "train" and not self._shows_metrics:
                    self._shows_metrics = True
                    self._newest_step = self._newest_evaluation = event.step or 0
                    self._shown_before = self._evaluated_before = event.step or 0
        for record in self._metrics.new_records():
            if self._shows_metrics:
                self._show(record)
        return self._outcome(now)

    def _show(self, record: MetricsLine) -> None:
        """Show one record, unless it was shown before a resumed run replaced its metrics."""
        if self._metrics.replacements > self._replacements:
            self._replacements = self._metrics.replacements
            self._shown_before = self._newest_step
            self._evaluated_before = self._newest_evaluation
        evaluations = record.evaluations()
        # One record may be both, and a step that goes back in the same file was computed again.
        if record.step > self._shown_before and (not evaluations or "loss" in record.facts):
            self._display.step(record)
            self._newest_step = max(self._newest_step, record.step)
        if evaluations and record.step > self._evaluated_before:
            self._display.evaluation(record)
            self._newest_evaluation = max(self._newest_evaluation, record.step)

    def _outcome(self, now: JobPhase) -> Outcome | None:
        if now != "ended":
            self._gone_since = None
            return None
        self._gone_since = self._gone_since or time.monotonic()
        result = read_result(self._run)
        if result is not None:
            return Outcome(status=result.status, result=result)
        late = time.monotonic() - self._gone_since > _RESULT_GRACE_S
        return Outcome(status="lost", result=None) if late else None


def follow(
    run: RunDirectory,
    display: Display,
    *,
    job_state: Callable[[], JobPhase],
    interrupted: Callable[[], bool] | None = None,
    output: Output | None = None,
    waits_for: Callable[[], str | None] = lambda: None,
    first_attempt: int = 0,
) -> Outcome:
    """Show a run's progress until it has ended for good, through requeues.

    Args:
        job_state: returns the state of the job.
        interrupted: called at Ctrl-C; it returns whether to keep following. None always ends.
        output: what the user's own program prints; None shows none of it.
        waits_for: why the job waits, in words; None where that is not known.
        first_attempt: the first attempt whose events and metrics are shown.

    Returns:
        How it ended.

    Raises:
        KeyboardInterrupt: Ctrl-C, and following ends.
    """
    follower = _Follower(run, display, job_state, output, waits_for, first_attempt)
    while True:
        try:
            if (outcome := follower.look()) is not None:
                return outcome
            time.sleep(_POLL_S)
        except KeyboardInterrupt:
            if interrupted is None or not interrupted():
                raise


# One query every two seconds is what Slurm's own documentation calls considerate (squeue(1), PERFORMANCE).
_QUERY_EVERY_S = 2.0


class JobPoller:
    """Polls the state of a run's job.

    Args:
        run: the run; another job may take it over.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._asked = float("-inf")
        self._state: JobPhase = "pending"
        self._reason: str | None = None

    def waits_for(self) -> str | None:
        """Return why the job waits, in words, as Slurm has said it last; None before it was asked."""
        if self._reason is None:
            return None
        return pending_reason(self._reason, job_id="", run=self._run.run_id).why

    def __call__(self) -> JobPhase:
        """Return the job's state; unchanged if the controller does not respond; a job unknown to Slurm has ended."""
        if time.monotonic() - self._asked >= _QUERY_EVERY_S:
            self._asked = time.monotonic()
            with contextlib.suppress(commands.SlurmUnavailableError):
                submission = read_submission(self._run)
                job = None if submission is None else commands.show_job(submission.job_id)
                self._reason = None if job is None else job.get("Reason")
                state = None if job is None else JOB_STATES.get(job.get("JobState", ""))
                if job is None or (state is not None and state.has_ended):
                    self._state = "ended"
                elif state is not None:
                    self._state = "pending" if state.is_waiting else "running"
        return self._state


# Most changes show in files; Slurm is queried for runs that ended without a record.
_STATE_EVERY_S = 10.0


class EndOfRun:
    """Polls whether a run has ended, through requeues.

    Attributes:
        status: its state and progress when it was polled last; None before.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._asked = float("-inf")
        self.status: RunStatus | None = None

    @property
    def state(self) -> State | None:
        """Its state when it was polled last; None before."""
        return None if self.status is None else self.status.state

    def is_alive(self) -> bool:
        """Return whether the run is pending or running, or its state is unknown."""
        if exists(self._run.result) or time.monotonic() - self._asked > _STATE_EVERY_S:
            self._asked = time.monotonic()
            self.status = status_now(self._run, os.environ)
        return self.state is None or self.state.is_alive or self.state is State.UNKNOWN


_STEPS_EVERY_S = 60.0


class ProgressLines:
    """Prints a line to stderr when a state changes; while it stays the same, a line a minute if steps were made.

    Args:
        name: what each line begins with.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._state = self._steps = ""
        self._printed = float("-inf")

    def show(self, state: str, steps: str = "") -> None:
        """Print the state and the steps done, unless the line would repeat the last one or comes too early."""
        is_new_step = steps != self._steps and time.monotonic() - self._printed >= _STEPS_EVERY_S
        if state == self._state and not is_new_step:
            return
        self._state = state
        self._steps = steps
        self._printed = time.monotonic()
        line = f"{self._name}: {state}, {steps}" if steps else f"{self._name}: {state}"
        sys.stderr.write(f"{printable(line)}\n")
        sys.stderr.flush()

    def show_run(self, status: RunStatus) -> None:
        """Print the state of a run, and its steps if it records any."""
        steps = "" if status.step is None else f"step {step_text(status.step, status.files.total_steps)}"
        self.show(status.state, steps)
