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
    from rich.progress import Progress, TaskID

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
        self._steps_per_epoch = steps_per_epoch
        self._epochs = epochs
        self._total_steps = total_steps or (steps_per_epoch or 0) * epochs
        self._last_line = time.monotonic()
        self._newest: MetricsLine | None = None

    def job(self, state: JobPhase, why: str | None = None) -> None:
        """Print that the job's state has changed, or why it waits."""
        echo(_JOB_LINES[state] if why is None else f"{_JOB_LINES[state]}: {why}", err=True)

    def output(self, line: str) -> None:
        """Print a line of rank 0's output."""
        echo(f"rank 0 | {line}", err=True)

    def event(self, event: Event) -> None:
        """Print the line for an event, if it has one."""
        if (line := event_line(event)) is not None:
            echo(line, err=True)

    def step(self, record: MetricsLine) -> None:
        """Keep the record, and print it if the last line is at least ten seconds old."""
        self._newest = record
        if time.monotonic() - self._last_line >= _LINE_EVERY_S:
            self._print(f"{self._where(record)}  {step_text(record)}".rstrip())

    def evaluation(self, record: MetricsLine) -> None:
        """Print the newest training record with the evaluation."""
        training = f"  {step_text(self._newest)}" if self._newest else ""
        self._print(f"{self._where(record)}{training}  {evaluation_text(record)}")

    def _where(self, record: MetricsLine) -> str:
        epoch = epoch_of(record)
        if epoch is None:
            return f"step {record.step}"
        total = f"/{self._total_steps}" if self._total_steps else ""
        return f"epoch {epoch + 1}/{self._epochs}  step {record.step}{total}"

    def _print(self, line: str) -> None:
        self._last_line = time.monotonic()
        echo(line, err=True)


class BarDisplay:
    """Draws a progress bar for the current epoch; each finished epoch becomes a line above it.

    Args:
        steps_per_epoch: the optimizer steps of an epoch; None if not known.
        epochs: the epochs of the training.
        total_steps: the optimizer steps of the training; None is those of all its epochs.
    """

    def __init__(self, steps_per_epoch: int | None, epochs: int, total_steps: int | None = None) -> None:
        from rich.console import Console, Group
        from rich.live import Live
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeRemainingColumn,
        )

        self._steps_per_epoch = steps_per_epoch
        self._epochs = epochs
        self._total_steps = total_steps or (steps_per_epoch or 0) * epochs
        self._progress: Progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            # Names of metrics may hold brackets.
            TextColumn("{task.fields[numbers]}", markup=False),
            TimeRemainingColumn(compact=True),
            console=Console(stderr=True),
        )
        self._waiting: Progress = Progress(SpinnerColumn(), TextColumn("{task.description}", markup=False))
        self._live = Live(Group(self._progress, self._waiting), console=self._progress.console, refresh_per_second=10)
        self._bar: TaskID | None = None
        self._spinner: TaskID | None = None
        self._state: JobPhase | None = None
        self._epoch: int | None = None
        self._training = ""

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._wait(None)
        self._live.stop()

    def job(self, state: JobPhase, why: str | None = None) -> None:
        """Print that the job's state has changed; while it waits or has made no step, a spinner shows why."""
        if state != self._state:
            self._state = state
            self._progress.console.print(_JOB_LINES[state], style="dim", highlight=False)
        if state == "running":
            why = why or "the ranks start: imports, data and the first step"
        self._wait(None if state == "ended" or self._bar is not None else why)

    def _wait(self, why: str | None) -> None:
        """Show a spinner with a text; None removes it."""
        if self._spinner is not None:
            self._waiting.remove_task(self._spinner)
            self._spinner = None
        if why is not None:
            self._spinner = self._waiting.add_task(printable(why))

    def output(self, line: str) -> None:
        """Print a line of rank 0's output above the bar."""
        self._wait(None)
        self._progress.console.print(printable(f"rank 0 | {line}"), highlight=False, markup=False, soft_wrap=True)

    def event(self, event: Event) -> None:
        """Print the line for an event, if it has one."""
        if event.kind == "train":
            self._wait(None)
        if (line := event_line(event)) is not None:
            # A word that is longer than the line, such as a path, is not broken.
            style = "red" if event.kind == "failure" else ""
            self._progress.console.print(
                printable(line), style=style, highlight=False, markup=False, overflow="ignore", crop=False
            )

    def step(self, record: MetricsLine) -> None:
        """Move the bar of the record's epoch."""
        self._wait(None)
        epoch = epoch_of(record)
        if self._bar is None or epoch != self._epoch:
            self._keep_as_line()
            self._epoch = epoch
            title = "step" if epoch is None else f"epoch {epoch + 1}/{self._epochs}"
            self._bar = self._progress.add_task(title, total=self._steps_per_epoch, numbers="")
        self._training = step_text(record)
        steps_before_epoch = 0
        if self._steps_per_epoch:
            # Counted from the end: only epochs before a change of the batch have other numbers of steps.
            epochs_left = self._epochs - (epoch or 0)
            steps_before_epoch = self._total_steps - epochs_left * self._steps_per_epoch
        self._update(self._training, completed=record.step - steps_before_epoch)

    def evaluation(self, record: MetricsLine) -> None:
        """Show the evaluation next to the bar of its epoch."""
        self._update(f"{self._training}  {evaluation_text(record)}".strip())

    def _keep_as_line(self) -> None:
        """Replace a finished bar by a line: a live display that is higher than the screen would be cut off."""
        if self._bar is None:
            return
        task = self._progress.tasks[0]
        self._progress.remove_task(self._bar)
        self._progress.console.print(f"{task.description}  {task.fields['numbers']}", highlight=False, markup=False)

    def _update(self, numbers: str, *, completed: float | None = None) -> None:
        """Show numbers next to the bar, and move it to a step; None leaves it where it is."""
        if self._bar is not None:
            self._progress.update(self._bar, completed=completed, numbers=numbers)


def epoch_of(record: MetricsLine) -> int | None:
    """Return the epoch of a record; None without one: a function of the user's own may log what it likes."""
    epoch = record.number("epoch")
    return None if epoch is None else int(epoch)


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
