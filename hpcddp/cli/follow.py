"""The output of ``submit --follow``: the progress of a submitted run until it ends."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Final, Self

import typer

from hpcddp.cli.options import run_argument
from hpcddp.cli.output import echo
from hpcddp.errors import printable

if TYPE_CHECKING:
    from hpcddp.manage.follow import Display, JobPhase, Outcome, Output
    from hpcddp.run.directory import RunDirectory
    from hpcddp.run.events import Event
    from hpcddp.run.metrics import MetricsLine
    from hpcddp.submission.submit import Submission

_LINE_EVERY_S = 10.0
_LONGEST_LINE: Final = 400
_JOB_LINES: dict[JobPhase, str] = {
    "pending": "waiting for Slurm to start the job",
    "running": "the job is running",
    "ended": "the job has ended",
}


def follow_run(submission: Submission) -> Outcome:
    """Show a run's progress until it ends, through requeues, and return how it ended.

    Ctrl-C stops a run on this machine, which is followed until it is saved; for a run on Slurm it ends the following.
    """
    from hpcddp.run.job_records import read_plan

    # A command may have no batch, and so no plan.
    plan = read_plan(submission.run)
    steps, total = (None, None) if plan is None else (plan.steps_per_epoch, plan.total_steps)
    if sys.stderr.isatty():
        with BarDisplay(steps, submission.epochs, total) as bars:
            return _follow(submission, bars)
    return _follow(submission, PlainDisplay(steps, submission.epochs, total))


def _follow(submission: Submission, display: Display) -> Outcome:
    from hpcddp.manage.follow import follow
    from hpcddp.submission.interrupts import exit_code_of

    is_local = submission.cluster != "slurm"
    job_state, waits_for = _job_state(submission)
    stop = None
    if is_local:
        stop = _stopper(submission)
    try:
        return follow(
            submission.run,
            display,
            job_state=job_state,
            waits_for=waits_for,
            interrupted=stop,
            output=_output(submission),
            first_attempt=submission.first_attempt,
        )
    except KeyboardInterrupt as interruption:
        _print_end_of_following(submission.run, is_local=is_local)
        raise typer.Exit(exit_code_of(interruption)) from None


def _print_end_of_following(run: RunDirectory, *, is_local: bool) -> None:
    argument = run_argument(run.path)
    # The first Ctrl-C has told a local run to end.
    outcome = "saves and ends" if is_local else "goes on"
    echo(f"\nno longer following; run {run.run_id} {outcome}", err=True)
    echo(f"to follow it again   {shlex.join(['hpcddp', 'logs', argument, '--follow'])}", err=True)
    if not is_local:
        echo(f"to end it            {shlex.join(['hpcddp', 'cancel', argument])}", err=True)


def _output(submission: Submission) -> Output | None:
    """Return the reader of the tasks' output; None for the training of a job file, which shows its steps instead."""
    from hpcddp.manage.logs import OutputFollower
    from hpcddp.run.job_file import read_job_file

    run = submission.run
    if read_job_file(run).train is not None:
        return None
    follower = OutputFollower(run, first_attempt=submission.first_attempt)

    def lines(*, ended: bool) -> list[str]:
        return [_shortened(line.text) for line in follower.new_lines(time.time(), ended=ended)]

    return lines


def _shortened(line: str) -> str:
    """Return a line that does not fill the screen, as faulthandler's list of modules does; ``logs`` prints it whole."""
    size = len(line)
    if size <= _LONGEST_LINE:
        return line
    return f"{line[:_LONGEST_LINE]} ... ({size:,} characters; hpcddp logs has them)"


def _stopper(submission: Submission) -> Callable[[], bool]:
    """Return the function that Ctrl-C calls: the first call stops the run, the second one ends the following."""
    stopped = False

    def stop() -> bool:
        nonlocal stopped
        if stopped:
            return False
        stopped = True
        echo("\nstopping: the run gets SIGTERM, saves and ends; Ctrl-C again to stop following it", err=True)
        # Without the process, the run has just ended.
        with suppress(ProcessLookupError):
            os.kill(int(submission.job_id), signal.SIGTERM)
        return True

    return stop


def _job_state(submission: Submission) -> tuple[Callable[[], JobPhase], Callable[[], str | None]]:
    """Return the functions with which ``follow`` asks for the state of the job, and why it waits."""
    from hpcddp.manage import follow as watch

    if submission.cluster == "slurm":
        poller = watch.JobPoller(submission.run)
        return poller, poller.waits_for

    def local() -> JobPhase:
        return "ended" if submission.job.done() else "running"

    return local, lambda: None


class PlainDisplay:
    """Prints one line per evaluation, and one every ten seconds in between.

    Args:
        steps_per_epoch: the optimizer steps of an epoch; None if not known.
        epochs: the epochs of the training.
        total_steps: the optimizer steps of the training; None is those of all its epochs.
    """

    def __init__(self, steps_per_epoch: int | None, epochs: int, total_steps: int | None = None) -> None:
        self._epochs = epochs
        self._total_steps = total_steps or (steps_per_epoch or 0) * epochs
        self._last_line = time.monotonic()
        self._newest: MetricsLine | None = None

    def _print(self, line: str) -> None:
        echo(line, err=True)

    def job(self, state: JobPhase, why: str | None = None) -> None:
        """Print that the job's state has changed, or why it waits."""
        self._print(_JOB_LINES[state] if why is None else f"{_JOB_LINES[state]}: {why}")

    def output(self, line: str) -> None:
        """Print a line of rank 0's output."""
        self._print(f"rank 0 | {line}")

    def event(self, event: Event) -> None:
        """Print the line for an event, if it has one."""
        if (line := event_line(event)) is not None:
            self._print(line)

    def step(self, record: MetricsLine) -> None:
        """Keep the record, and print it if the last line is at least ten seconds old."""
        self._newest = record
        if time.monotonic() - self._last_line >= _LINE_EVERY_S:
            self._print_numbers(record, step_text(record))

    def evaluation(self, record: MetricsLine) -> None:
        """Print the newest training record with the evaluation."""
        training = f"{step_text(self._newest)}  " if self._newest else ""
        self._print_numbers(record, f"{training}{evaluation_text(record)}")

    def _print_numbers(self, record: MetricsLine, numbers: str) -> None:
        """Print numbers behind the step and the epoch of a record."""
        self._last_line = time.monotonic()
        where = f"step {record.step}"
        # A function of the user's own may log what it likes.
        epoch = record.number("epoch")
        if epoch is not None:
            total = f"/{self._total_steps}" if self._total_steps else ""
            where = f"epoch {int(epoch) + 1}/{self._epochs}  {where}{total}"
        self._print(f"{where}  {numbers}".rstrip())


class BarDisplay(PlainDisplay):
    """Draws a bar of all steps; the lines that ``PlainDisplay`` prints, but for those of steps, stand above it.

    The arguments are those of ``PlainDisplay``.
    """

    def __init__(self, steps_per_epoch: int | None, epochs: int, total_steps: int | None = None) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeRemainingColumn,
        )

        super().__init__(steps_per_epoch, epochs, total_steps)
        self._progress = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            # Names of metrics may hold brackets.
            TextColumn("{task.description}", markup=False),
            TimeRemainingColumn(compact=True),
            console=Console(stderr=True),
        )
        self._bar = self._progress.add_task("", total=self._total_steps or None, visible=False)
        self._state: JobPhase | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def _print(self, line: str) -> None:
        self._progress.console.print(printable(line), highlight=False, markup=False, soft_wrap=True)

    def _show(self, text: str, *, completed: int | None = None) -> None:
        """Show a text beside the bar, and move it to a step; without a text no bar is there."""
        self._progress.update(self._bar, description=printable(text), visible=bool(text), completed=completed)

    def job(self, state: JobPhase, why: str | None = None) -> None:
        """Print that the job's state has changed; while it waits or has made no step, the bar says why."""
        if state != self._state:
            self._state = state
            self._print(_JOB_LINES[state])
        if self._newest is None:
            if state == "running":
                why = "the ranks start: imports, data and the first step"
            self._show(why or "")

    def output(self, line: str) -> None:
        """Print a line of rank 0's output above the bar."""
        if self._newest is None:
            self._show("")
        super().output(line)

    def step(self, record: MetricsLine) -> None:
        """Move the bar."""
        self._newest = record
        self._show(step_text(record), completed=record.step)


_EVALUATIONS: Final = {"val_loss": "val_loss {:.4f}", "val_accuracy": "val_accuracy {:.2%}"}
_NOT_SHOWN: Final = frozenset({"epoch", "lr", "samples_seen", "samples_per_s", "val_top5"})
_MOST_SHOWN: Final = 3


def step_text(record: MetricsLine) -> str:
    """Return the numbers of a training record as text, without those that it does not have."""
    texts = _number_texts(record, {"loss": "loss {:.4f}", "samples_per_s": "{:,.0f} samples/s"})
    if record.number("loss") is not None:
        return "  ".join(texts)
    # Code of the user's own logs under names of its own.
    others = [f"{name} {value:.4g}" for name, value in record.numbers().items() if name not in _NOT_SHOWN]
    return "  ".join([*others[:_MOST_SHOWN], *texts])


def evaluation_text(record: MetricsLine) -> str:
    """Return the numbers of an evaluation record as text, without those that it does not have."""
    texts = _number_texts(record, _EVALUATIONS)
    others = (name for name in record.evaluations() if name not in _EVALUATIONS and name not in _NOT_SHOWN)
    texts += [f"{name} {record.number(name):.4g}" for name in islice(others, _MOST_SHOWN)]
    return "  ".join(texts)


def _number_texts(record: MetricsLine, formats: Mapping[str, str]) -> list[str]:
    """Return the numbers that a record has, each in its format."""
    values = {name: record.number(name) for name in formats}
    return [formats[name].format(value) for name, value in values.items() if value is not None]


_END_VERBS: Final = {"failure": "failed", "stop": "stopped"}
# Their reason is that of the stop before them.
_CONTINUATION_LINES: Final = {
    "requeue": "requeued: the run continues when its job starts again",
    "restart": "restarted: the tasks start again in the same job",
}


def event_line(event: Event) -> str | None:
    """Return the line that is printed for an event; None for an event that is not shown."""
    if event.kind == "start":
        again = "" if event.attempt == 0 else f" (attempt {event.attempt})"
        return f"started on {event.host or 'a node'}{again}"
    if event.kind == "train" and event.step:
        return f"continues after step {event.step}"
    if event.kind in _END_VERBS:
        return f"{_END_VERBS[event.kind]}: {event.reason}"
    return _CONTINUATION_LINES.get(event.kind)
