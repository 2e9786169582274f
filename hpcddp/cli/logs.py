"""``hpcddp logs``."""

from __future__ import annotations

import json
import textwrap
import time
from collections import deque
from typing import TYPE_CHECKING, Annotated

import typer

from hpcddp.cli.options import RUN_ROOT, AsJson, Run, RunRoot
from hpcddp.cli.output import echo, styled, write
from hpcddp.errors import UserError, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hpcddp.manage.logs import LogLine
    from hpcddp.run.directory import AttemptDirectory, RunDirectory

_POLL_S = 0.5


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(logs)


def logs(
    run: Run = None,
    *,
    rank: Annotated[list[int] | None, typer.Option(metavar="R", help="Print only this rank; repeatable.")] = None,
    attempt: Annotated[
        int | None,
        typer.Option(metavar="N", help="Print this start of the job (0 is the first); without it, the newest."),
    ] = None,
    lines: Annotated[
        int | None, typer.Option("--lines", "-n", metavar="N", min=0, help="Print only the last N lines.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until the run has ended.")] = False,
    batch: Annotated[bool, typer.Option("--batch", help="Also print the output of the batch script.")] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Print control characters, such as colours, as they are in the logs.")
    ] = False,
    first_error: Annotated[
        bool,
        typer.Option(
            "--first-error",
            help="Print only the rank that failed first, its traceback, and the ranks that failed as a result.",
        ),
    ] = False,
    run_root: RunRoot = RUN_ROOT,
    as_json: AsJson = False,
) -> None:
    """Print the output of the ranks of a run, ordered by time.

    Each line starts with its time, rank and host. Control characters are printed as escapes. A warning of torch about
    hosts without a name is left out. --first-error prints which rank failed first, and how. --follow prints new lines,
    through requeues, until the run has ended.

    Example: hpcddp logs --first-error
    """
    from hpcddp.manage.overview import one_run
    from hpcddp.run.find import chosen_run

    if follow and (as_json or first_error or attempt is not None):
        raise UserError("--follow prints the newest attempt as it goes; leave out --json, --first-error and --attempt")
    directory = one_run(chosen_run(run, run_root))
    if first_error:
        _print_first_error(directory, attempt, as_json=as_json)
    elif follow:
        _follow(directory, ranks=rank or (), batch=batch, lines=lines, raw=raw)
    else:
        _print_logs(directory, attempt, ranks=rank or (), batch=batch, lines=lines, as_json=as_json, raw=raw)


def _print_first_error(run: RunDirectory, number: int | None, *, as_json: bool) -> None:
    from hpcddp.manage.first_error import failed_attempt, first_error
    from hpcddp.manage.logs import chosen_attempt

    # It refuses a run that has not started, and a number that no attempt has.
    chosen_attempt(run, number)
    failed = failed_attempt(run, number)
    if failed is None:
        if as_json:
            echo("null")
        else:
            where = "" if number is None else f"attempt {number} of "
            echo(f"nothing has failed in {where}run {run.run_id}")
        return
    error = first_error(failed)
    echo(json.dumps(error.as_json(), indent=2) if as_json else "\n".join(error.lines()))


def _print_logs(
    run: RunDirectory,
    number: int | None,
    *,
    ranks: Sequence[int],
    batch: bool,
    lines: int | None,
    as_json: bool,
    raw: bool,
) -> None:
    from hpcddp.manage.logs import chosen_attempt, last_of, merged, sources

    attempt = chosen_attempt(run, number)
    logs = sources(attempt, ranks=ranks, batch=batch)
    if lines is not None:
        logs = [last_of(log, lines) for log in logs]
    log_lines = _last(merged(logs), lines)
    if as_json:
        _print_document(attempt, log_lines)
        return
    printer = _Printer(attempt, raw=raw)
    printer.print(log_lines)
    if not printer.has_printed:
        echo(f"attempt {attempt.number} of run {attempt.run.run_id} has printed nothing yet", err=True)


def _print_document(attempt: AttemptDirectory, lines: Iterable[LogLine]) -> None:
    """Print lines as a JSON document, each when it is read: the logs may be larger than the memory."""
    head = json.dumps({"run_id": attempt.run.run_id, "attempt": attempt.number, "lines": []}, indent=2)
    write(head.removesuffix("]\n}"), nl=False)
    between = "\n"
    for line in lines:
        write(between + textwrap.indent(json.dumps(line.as_json(), indent=2), "    "), nl=False)
        between = ",\n"
    write("]\n}" if between == "\n" else "\n  ]\n}")


def _last(lines: Iterable[LogLine], count: int | None) -> Iterable[LogLine]:
    return lines if count is None else deque(lines, maxlen=count)


class _Printer:
    """Prints log lines, and a heading where the attempt or the day changes."""

    def __init__(self, attempt: AttemptDirectory, *, raw: bool) -> None:
        self._attempt = attempt
        self._raw = raw
        self.has_printed = False
        self._day = ""
        self._width = 0

    def print(self, lines: Iterable[LogLine]) -> None:
        """Print lines of the attempt."""
        for line in lines:
            self.has_printed = True
            moment = time.localtime(line.time)
            day = time.strftime("%Y-%m-%d", moment)
            if day != self._day:
                self._day = day
                heading = f"--- attempt {self._attempt.number} of run {self._attempt.run.run_id}, {day}"
                write(styled(printable(heading), "heading"))
            label = line.source.label
            self._width = max(self._width, len(label))
            clock = time.strftime("%H:%M:%S", moment)
            head = styled(printable(f"{clock} {label:<{self._width}} |"), "quiet")
            text = line.text if self._raw else printable(line.text)
            write(f"{head} {text}")


def _follow(run: RunDirectory, *, ranks: Sequence[int], batch: bool, lines: int | None, raw: bool) -> None:
    from hpcddp.manage.follow import EndOfRun
    from hpcddp.manage.logs import LogFollower

    end = EndOfRun(run)
    number: int | None = None
    if run.newest_attempt() is None:
        echo(f"run {run.run_id} has not started yet; waiting", err=True)
    while True:
        alive = end.is_alive()
        newest = run.newest_attempt()
        if newest is not None and newest != number:
            number = newest
            attempt = run.attempt(newest)
            follower = LogFollower(attempt, ranks=ranks, batch=batch, last=lines)
            printer = _Printer(attempt, raw=raw)
            printer.print(_last(follower.new_lines(time.time(), ended=not alive), lines))
        elif number is not None:
            printer.print(follower.new_lines(time.time(), ended=not alive))
        if not alive:
            echo(f"run {run.run_id} has ended: {end.state}", err=True)
            return
        time.sleep(_POLL_S)
