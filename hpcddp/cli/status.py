"""``hpcddp status``."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Final

import typer

from hpcddp.cli.options import RUN_ROOT, AsJson, RunRoot, complete_runs
from hpcddp.cli.output import Role, echo, styled, write
from hpcddp.errors import UserError

if TYPE_CHECKING:
    from hpcddp.manage.overview import Filter, Overview
    from hpcddp.manage.ranking import Ranking
    from hpcddp.slurm.job import State

_SHORTEST_INTERVAL_S = 2.0
_CLEAR = "\x1b[H\x1b[2J"


_ROLES: Final[Mapping[str, Role]] = MappingProxyType(
    {
        "running": "good",
        "finished": "good",
        "starting": "active",
        "stopping": "active",
        "pending": "waiting",
        "requeued": "waiting",
        "held": "waiting",
        "suspended": "waiting",
        "failed": "bad",
        "lost": "bad",
        "timed out": "bad",
        "preempted": "bad",
    }
)


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(status)


def status(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="Run id or a part of it, job name, Slurm job id, last, or run directory; without it, the newest runs.",
            autocompletion=complete_runs,
        ),
    ] = None,
    *,
    everything: Annotated[bool, typer.Option("--all", help="Show all your runs, in all run roots.")] = False,
    state: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STATE[,STATE]", help="Show only runs in these states; repeatable.", autocompletion=_complete_states
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="Show only runs of jobs with this name; may hold * and ?.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Show only runs submitted since: 90min, 12h, 7d, 2026-11-20 or 2026-11-20T08:00."
        ),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until Ctrl-C.")] = False,
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", min=_SHORTEST_INTERVAL_S, help="Time between refreshes.")
    ] = 10.0,
    sort: Annotated[
        str | None, typer.Option(metavar="METRIC", help="Sort the runs of a sweep by METRIC, such as loss.")
    ] = None,
    run_root: RunRoot = RUN_ROOT,
    as_json: AsJson = False,
) -> None:
    """Show the state of runs.

    Without RUN: the newest twenty runs in the run root, and older runs that wait or run; a sweep takes one line. With
    RUN: one run in detail. With the id of a sweep: all its elements; --sort sorts them by a metric, the best first.
    The command queries Slurm once for all runs.

    Example: hpcddp status --watch

    Example: hpcddp status --all --state running --since 7d
    """
    from hpcddp.manage.overview import Filter
    from hpcddp.manage.overview_text import table
    from hpcddp.manage.ranking import rank_only

    chosen_states: set[State] = set()
    for text in state or ():
        chosen_states |= {_state(word) for word in text.split(",")}
    moment = None if since is None else _moment(since, time.time())
    wanted = Filter(states=frozenset(chosen_states), name=name, since=moment)
    if run is not None and (everything or not wanted.is_empty):
        raise UserError(f"{run!r} names one run, and --all, --state, --name and --since choose among all runs")
    while True:
        overview = _look(run, run_root, everything=everything, wanted=wanted)
        ranking = None
        if sort is not None:
            ranking = rank_only(overview.lines if run else (), sort)
        if as_json:
            sweeps = {} if ranking is None else {"sweeps": [ranking.as_json()]}
            echo(json.dumps({**overview.as_json(), **sweeps}, indent=2))
        else:
            if run is not None:
                lines = _lines_of_one(overview, ranking)
            elif overview.lines:
                lines = table(overview.lines, width=_width(), paint=_styled)
            else:
                lines = [_nothing(run_root, everything=everything, wanted=wanted)]
            _print(lines, overview, clears_screen=watch and sys.stdout.isatty())
        if not watch:
            return
        time.sleep(interval)


def _state(text: str) -> State:
    from hpcddp.errors import did_you_mean
    from hpcddp.slurm.job import State

    word = text.strip().lower().replace("_", " ").replace("-", " ")
    if word in set(State):
        return State(word)
    instead = did_you_mean(word, map(str, State), f"write one of {', '.join(State)}")
    raise UserError(f"--state is {text!r}, which is not a state of a run; {instead}")


def _moment(text: str, now: float) -> float:
    """Return the moment of ``--since`` in seconds since the epoch."""
    from hpcddp.jobfile.units import UnitError, parse_duration

    with suppress(UnitError):
        return now - parse_duration(text).total_seconds()
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError, OSError):
        raise UserError(
            f"--since is {text!r}, which is not a time; write a duration such as 90min, 12h or 7d, or a date such as "
            "2026-11-20 or 2026-11-20T08:00"
        ) from None


def _complete_states(incomplete: str) -> list[str]:
    """Return the states that start with a text, for the shell."""
    from hpcddp.slurm.job import State

    return [word for state in State if (word := str(state).replace(" ", "-")).startswith(incomplete)]


def _look(run: str | None, run_root: Path, *, everything: bool, wanted: Filter) -> Overview:
    from hpcddp.manage.overview import entry_of, overview, overview_now
    from hpcddp.run.find import find_run
    from hpcddp.slurm.commands import queue

    environment = dict(os.environ)
    if run is not None:
        return overview_now([entry_of(find_run(run, run_root))], environment)
    return overview(run_root, ask=lambda: queue(environment), now=time.time(), everything=everything, wanted=wanted)


def _lines_of_one(overview: Overview, ranking: Ranking | None) -> list[str]:
    """Return the details of the only run, or of the only sweep with its elements.

    Args:
        ranking: the order of the elements; None is that of the sweep.
    """
    from hpcddp.manage.format import one_line
    from hpcddp.manage.overview_text import details, elements_table
    from hpcddp.manage.status import RunStatus

    (status,) = overview.lines
    if isinstance(status, RunStatus):
        return details(status, paint=_styled)
    heading = f"sweep {one_line(status.sweep.sweep_id)}: {status.sentence}"
    if ranking is not None:
        heading += f"; {one_line(ranking.sentence)}"
    return [heading, *elements_table(status, ranking=ranking, width=_width(), paint=_styled)]


def _width() -> int | None:
    """Return the columns of the terminal; None where the output goes to a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _print(lines: list[str], overview: Overview, *, clears_screen: bool) -> None:
    """Print lines about an overview, and what is missing in it."""
    if overview.left_out:
        lines = [*lines, f"{overview.left_out} older runs have ended; --all shows them too"]
    text = "\n".join(lines)
    # The lines have colours of their own; names in them are escaped.
    write(f"{_CLEAR}{text}" if clears_screen else text)
    if overview.unanswered is not None:
        echo(f"Slurm could not be asked, so these states are as far as files tell: {overview.unanswered}", err=True)


def _nothing(run_root: Path, *, everything: bool, wanted: Filter) -> str:
    from hpcddp.manage.format import one_line
    from hpcddp.run.find import indexed_runs

    given = {"--state": wanted.states, "--name": wanted.name, "--since": wanted.since}
    options = [option for option, value in given.items() if value]
    which = f"no run matches {' and '.join(options)}" if options else "there is no run"
    where = "" if everything else f" under {one_line(str(run_root.absolute()))}"
    sentence = f"{which}{where}"
    if not everything and indexed_runs():
        sentence += "; hpcddp status --all shows those of other run roots"
    return sentence


def _styled(text: str, state: State) -> str:
    """Return a text in the colour of a state."""
    role = _ROLES.get(str(state))
    return text if role is None else styled(text, role)
