"""``hpcddp cancel``."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from hpcddp.cli.options import RUN_ROOT, AsJson, RunRoot, complete_runs, run_argument
from hpcddp.cli.output import echo
from hpcddp.errors import UserError


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
    already ended, the command says so and exits with 0.

    Example: hpcddp cancel 20261121-1545
    """
    from hpcddp.manage.control import cancel as cancel_run
    from hpcddp.manage.control import cancel_sweep
    from hpcddp.manage.overview import entry_of, overview_of
    from hpcddp.manage.status import RunStatus
    from hpcddp.slurm import commands
    from hpcddp.submission.sweep_element import chosen_to_act_on

    environment = dict(os.environ)
    if run is None:
        newest = _newest_alive(run_root, environment)
        if newest is None:
            sentence = f"no run under {run_root.absolute()} waits or runs, so there is nothing to cancel"
            echo(json.dumps({"run_id": None, "sentence": sentence}, indent=2) if as_json else sentence)
            return
        if not yes:
            _confirm(run_argument(newest))
        run = str(newest)
    chosen = chosen_to_act_on(run, run_root)
    found = overview_of([entry_of(chosen)], ask=lambda: commands.queue(environment), now=time.time())
    (line,) = found.lines

    def end(job_ids: Sequence[str]) -> None:
        commands.cancel(job_ids, environment)

    if isinstance(line, RunStatus):
        sentence, run_id = cancel_run(line, end=end), line.run.run_id
    else:
        sentence, run_id = cancel_sweep(line, end=end, now=time.time()), line.sweep.sweep_id
    echo(json.dumps({"run_id": run_id, "sentence": sentence}, indent=2) if as_json else sentence)


def _newest_alive(run_root: Path, environment: Mapping[str, str]) -> Path | None:
    """Return the directory of the newest run or sweep that waits or runs, or None.

    Raises:
        UserError: Slurm could not be asked.
    """
    from hpcddp.manage.overview import overview
    from hpcddp.manage.status import RunStatus
    from hpcddp.slurm import commands

    found = overview(run_root, ask=lambda: commands.queue(environment), now=time.time(), everything=False)
    for line in found.lines:
        if line.is_alive:
            return line.run.path if isinstance(line, RunStatus) else line.sweep.path
    if found.unanswered is not None:
        raise UserError(f"no RUN is given, and Slurm could not be asked which runs are alive: {found.unanswered}")
    return None


def _confirm(run: str) -> None:
    if not sys.stdin.isatty():
        raise UserError(f"no RUN is given; name the run, or add --yes to cancel the newest that is alive, {run}")
    typer.confirm(f"Cancel {run}?", abort=True, err=True)
