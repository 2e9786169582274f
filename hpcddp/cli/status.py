"""``hpcddp status``."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Final

import typer

from hpcddp.cli.options import RUN_ROOT, AsJson, RunRoot, complete_runs
from hpcddp.cli.output import Role, echo, styled, write

if TYPE_CHECKING:
    from hpcddp.manage.overview import Overview
    from hpcddp.manage.status import State

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
            help="Run id, the start of one, or run directory; without it, all runs.",
            autocompletion=complete_runs,
        ),
    ] = None,
    *,
    everything: Annotated[
        bool, typer.Option("--all", help="Show all runs, including those that ended long ago.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until Ctrl-C.")] = False,
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", min=_SHORTEST_INTERVAL_S, help="Time between refreshes.")
    ] = 10.0,
    run_root: RunRoot = RUN_ROOT,
    as_json: AsJson = False,
) -> None:
    """Show the state of runs.

    Without RUN: all runs in the run root, newest first, and one line for each sweep. With RUN: one run in detail. With
    the id of a sweep: all its elements. Slurm is queried once for all runs.

    Example: hpcddp status --watch
    """
    look = _looker(run, run_root, everything=everything)
    while True:
        found = look()
        if as_json:
            echo(json.dumps(found.as_json(), indent=2))
        else:
            _show(found, run, run_root, again=watch)
        if not watch:
            return
        time.sleep(interval)


def _looker(run: str | None, run_root: Path, *, everything: bool) -> Callable[[], Overview]:
    from hpcddp.manage.overview import entry_of, overview, overview_of
    from hpcddp.run.find import find_run
    from hpcddp.slurm.commands import queue

    environment = dict(os.environ)

    def look() -> Overview:
        if run is None:
            return overview(run_root, ask=lambda: queue(environment), now=time.time(), everything=everything)
        entry = entry_of(find_run(run, run_root))
        return overview_of([entry], ask=lambda: queue(environment), now=time.time())

    return look


def _show(found: Overview, run: str | None, run_root: Path, *, again: bool) -> None:
    from hpcddp.manage.format import one_line
    from hpcddp.manage.overview import SweepStatus, details, elements_table, table
    from hpcddp.manage.status import RunStatus

    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else None
    lines = (
        table(found.lines, width=width, paint=_styled)
        if found.lines
        else [f"there is no run under {one_line(str(run_root.absolute()))}"]
    )
    if run is not None:
        (only,) = found.lines
        if isinstance(only, RunStatus):
            lines = details(only, paint=_styled)
        elif isinstance(only, SweepStatus):
            name = one_line(only.sweep.sweep_id)
            lines = [f"sweep {name}: {only.sentence}", *elements_table(only, width=width, paint=_styled)]
    if found.left_out:
        lines.append(f"{found.left_out} older runs have ended; --all shows them too")
    head = _CLEAR if again and terminal else ""
    # The lines have colours of their own; names in them are escaped.
    write(head + "\n".join(lines))
    if found.unanswered is not None:
        echo(f"Slurm could not be asked, so these states are as far as files tell: {found.unanswered}", err=True)


def _styled(text: str, state: State) -> str:
    """Return a text in the colour of a state."""
    role = _ROLES.get(str(state))
    return text if role is None else styled(text, role)
