"""``hpcddp shell``."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from hpcddp.cli.command_words import CommandWords, words_of_command
from hpcddp.cli.options import RUN_ROOT, Run, RunRoot


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(cls=CommandWords)(shell)


def shell(
    context: typer.Context,
    run: Run = None,
    *,
    rank: Annotated[int, typer.Option(metavar="R", help="Run on the node of this rank.")] = 0,
    run_root: RunRoot = RUN_ROOT,
) -> None:
    """Open a shell inside a running job, or run a command there.

    The command after --, or your shell ($SHELL), runs beside the tasks of the job and shares their CPUs, memory and
    GPUs (srun --overlap), so that nvidia-smi, rocm-smi or top show what a rank does. For a run on this machine, no srun
    is needed. hpcddp shell returns the exit code of the command.

    Example: hpcddp shell 20260314-1544 -- top -b -n 1
    """
    from hpcddp.manage.live import live_run, run_inside
    from hpcddp.manage.overview import one_run, status_now
    from hpcddp.submission.sweep_element import chosen_to_act_on

    environment = dict(os.environ)
    chosen = one_run(chosen_to_act_on(run, run_root))
    status = status_now(chosen, environment)
    command = words_of_command(context) or (environment.get("SHELL") or "/bin/sh",)
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    raise typer.Exit(run_inside(live_run(status), rank, command, environment, terminal=terminal))
