"""``hpcddp cancel``."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcddp.cli.options import RUN_ROOT, AsJson, RunRoot, complete_runs, run_argument
from hpcddp.cli.output import echo
from hpcddp.errors import UserError

if TYPE_CHECKING:
    from hpcddp.manage.overview import Line
    from hpcddp.run.directory import RunDirectory


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(cancel)


def cancel(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="Run id or a part of it, job name, Slurm job id, last, or run directory; without it, the command "
            "asks about the newest run that waits or runs.",
            autocompletion=complete_runs,
        ),
    ] = None,
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    run_root: RunRoot = RUN_ROOT,
    as_json: AsJson = False,
) -> None:
    """Cancel a run, or all elements of a sweep.

    The run saves first, if Slurm leaves it enough time. A cancelled run is not requeued; hpcddp submit --resume RUN
    continues it. Without RUN, the command asks before it cancels the newest run that waits or runs. If the run has
    already ended, the command says so and exits with 0; what a killed batch script has left on this machine receives
    SIGTERM.

    Example: hpcddp cancel 20261121-1545
    """
    from hpcddp.manage.control import cancel as cancel_run
    from hpcddp.manage.control import cancel_sweep
    from hpcddp.manage.overview import entry_of, overview_now
    from hpcddp.manage.status import RunStatus
    from hpcddp.slurm import commands
    from hpcddp.submission.sweep_element import chosen_to_act_on

    environment = dict(os.environ)
    if run is None:
        newest = _newest_alive(run_root, environment)
        if newest is None:
            sentence = f"no run under {run_root.absolute()} waits or runs, so there is nothing to cancel"
            _print(None, sentence, as_json=as_json)
            return
        if not yes:
            _confirm(newest)
        run = str(_directory_of(newest).path)
    entry = entry_of(chosen_to_act_on(run, run_root))
    (status,) = overview_now([entry], environment).lines

    def end(job_ids: Sequence[str]) -> None:
        commands.cancel(job_ids, environment)

    if isinstance(status, RunStatus):
        sentence = cancel_run(status, end=end)
        _print(status.run.run_id, sentence, as_json=as_json)
    else:
        sentence = cancel_sweep(status, end=end, now=time.time())
        _print(status.sweep.sweep_id, sentence, as_json=as_json)


def _print(run_id: str | None, sentence: str, *, as_json: bool) -> None:
    echo(json.dumps({"run_id": run_id, "sentence": sentence}, indent=2) if as_json else sentence)


def _directory_of(line: Line) -> RunDirectory:
    from hpcddp.manage.status import RunStatus

    return line.run if isinstance(line, RunStatus) else line.sweep.directory


def _newest_alive(run_root: Path, environment: Mapping[str, str]) -> Line | None:
    """Return the newest run or sweep that waits or runs, or None.

    Raises:
        UserError: Slurm could not be asked.
    """
    from hpcddp.manage.overview import overview
    from hpcddp.slurm import commands

    newest = overview(run_root, ask=lambda: commands.queue(environment), now=time.time(), everything=False)
    for line in newest.lines:
        if line.is_alive:
            return line
    if newest.unanswered is not None:
        raise UserError(f"no RUN is given, and Slurm could not be asked which runs are alive: {newest.unanswered}")
    return None


def _confirm(line: Line) -> None:
    """Ask whether a run or sweep is to be cancelled."""
    from hpcddp.manage.status import RunStatus

    state = line.state if isinstance(line, RunStatus) else line.sentence
    directory = _directory_of(line).path
    argument = run_argument(directory)
    if not sys.stdin.isatty():
        raise UserError(f"no RUN is given; name the run, or add --yes to cancel the newest that is alive, {argument}")
    try:
        typer.confirm(f"Cancel {directory.parent.name}, {state} ({argument})?", abort=True, err=True)
    except typer.Abort:
        echo("nothing was cancelled", err=True)
        raise
