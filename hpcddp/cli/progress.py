"""How a followed run looks: a bar per epoch on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import typer

from hpcddp.launch.follow import JobState

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_LINE_EVERY_S = 10.0
_JOB_LINES: dict[JobState, str] = {
    "pending": "waiting for Slurm to start the job",
    "running": "the job is running",
    "ended": "the job has ended",
}


class PlainDisplay:
    """Prints one line per evaluation, and one every ten seconds in between.

    Args:
        steps_per_epoch: how many optimizer steps an epoch has, None if not known.
        epochs: how many epochs the run has.
    """

    def __init__(self, steps_per_epoch: int | None, epochs: int) -> None:
        self._steps_per_epoch = steps_per_epoch
        self._epochs = epochs
        self._last_line = time.monotonic()
        self._newest: dict[str, Any] | None = None

    def job(self, state: JobState) -> None:
        """Say that the job's state has changed."""
        typer.echo(_JOB_LINES[state], err=True)

    def output(self, line: str) -> None:
        """Print a line of rank 0's own."""
        typer.echo(f"rank 0 | {line}", err=True)

    def event(self, event: dict[str, Any]) -> None:
        """Say what a person wants to know of an event."""
        if (line := event_line(event)) is not None:
            typer.echo(line, err=True)

    def step(self, record: dict[str, Any]) -> None:
        """Keep the record; print it if the last line is some time ago."""
        self._newest = record
        if time.monotonic() - self._last_line >= _LINE_EVERY_S:
            self._print(f"{self._where(record)}  {step_text(record)}".rstrip())

    def evaluation(self, record: dict[str, Any]) -> None:
        """Print where training stands."""
        training = f"  {step_text(self._newest)}" if self._newest else ""
        self._print(f"{self._where(record)}{training}  {evaluation_text(record)}")

    def _where(self, record: dict[str, Any]) -> str:
        if "epoch" not in record:
            # A function of the user's own may count steps only.
            return f"step {record['step']}"
        total = f"/{self._steps_per_epoch * self._epochs}" if self._steps_per_epoch else ""
        return f"epoch {record['epoch'] + 1}/{self._epochs}  step {record['step']}{total}"

    def _print(self, line: str) -> None:
        self._last_line = time.monotonic()
        typer.echo(line, err=True)


class BarDisplay:
    """Draws one progress bar per epoch: the current one moves, those that are done become lines above it.

    Args:
        steps_per_epoch: how many optimizer steps an epoch has, None if not known.
        epochs: how many epochs the run has.
    """

    def __init__(self, steps_per_epoch: int | None, epochs: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._steps_per_epoch = steps_per_epoch
        self._epochs = epochs
        self._progress: Progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(compact=True),
            console=Console(stderr=True),
        )
        self._bar: TaskID | None = None
        self._epoch: int | None = None
        self._training = ""

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def job(self, state: JobState) -> None:
        """Say that the job's state has changed."""
        self._progress.console.print(_JOB_LINES[state], style="dim", highlight=False)

    def output(self, line: str) -> None:
        """Print a line of rank 0's own above the bars, as it is."""
        from rich.text import Text

        self._progress.console.print(Text.from_ansi(f"rank 0 | {line}"), soft_wrap=True)

    def event(self, event: dict[str, Any]) -> None:
        """Say what a person wants to know of an event."""
        if (line := event_line(event)) is not None:
            self._progress.console.print(line, highlight=False, markup=False)

    def step(self, record: dict[str, Any]) -> None:
        """Move the bar of the record's epoch."""
        epoch = record.get("epoch")
        if self._bar is None or epoch != self._epoch:
            self._keep_as_line()
            self._epoch = epoch
            # A function of the user's own may count steps only.
            title = "step" if epoch is None else f"epoch {epoch + 1}/{self._epochs}"
            self._bar = self._progress.add_task(title, total=self._steps_per_epoch, numbers="")
        self._training = step_text(record)
        done = record["step"] - (epoch or 0) * (self._steps_per_epoch or 0)
        self._update(completed=done, numbers=self._training)

    def evaluation(self, record: dict[str, Any]) -> None:
        """Write the evaluation behind the bar of its epoch."""
        self._update(numbers=f"{self._training}  {evaluation_text(record)}".strip())

    def _keep_as_line(self) -> None:
        """Print the bar that is done as a line: a live display that is higher than the screen would be cut."""
        if self._bar is None:
            return
        task = self._progress.tasks[0]
        self._progress.remove_task(self._bar)
        self._progress.console.print(f"{task.description}  {task.fields['numbers']}", highlight=False, markup=False)

    def _update(self, **fields: Any) -> None:  # noqa: ANN401
        if self._bar is not None:
            self._progress.update(self._bar, **fields)


def step_text(record: dict[str, Any]) -> str:
    """Return the numbers of a training record, those that are there."""
    return _numbers(record, {"loss": "loss {:.4f}", "samples_per_s": "{:,.0f} samples/s"})


def evaluation_text(record: dict[str, Any]) -> str:
    """Return the numbers of an evaluation record, those that are there."""
    return _numbers(record, {"val_loss": "val_loss {:.4f}", "val_accuracy": "val_accuracy {:.2%}"})


def _numbers(record: Mapping[str, Any], formats: Mapping[str, str]) -> str:
    known = {name: record.get(name) for name in formats}
    return "  ".join(formats[name].format(value) for name, value in known.items() if isinstance(value, int | float))


def event_line(event: dict[str, Any]) -> str | None:
    """Return the line for an event, or None if it is of no interest to somebody who watches."""
    if event["event"] == "start":
        again = "" if event["attempt"] == 0 else f" (attempt {event['attempt']})"
        return f"started on {event.get('host', 'a node')}{again}"
    if event["event"] == "failure":
        return f"failed: {event['reason']}"
    if event["event"] == "stop":
        return f"stopped: {event['reason']}"
    if event["event"] == "requeue":
        return "requeued: it goes on when its job starts again"
    return None
