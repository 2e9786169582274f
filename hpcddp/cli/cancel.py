"""``hpcddp cancel``."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from typing import Annotated

import typer

from hpcddp.cli.options import RUN_ROOT, AsJson, RunRoot, complete_runs
from hpcddp.cli.output import echo


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(cancel)


def cancel(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="Run id or a part of it, job name, Slurm job id, last, or run directory.",
            autocompletion=complete_runs,
        ),
    ],
    *,
    run_root: RunRoot = RUN_ROOT,
    as_json: AsJson = False,
) -> None:
    """Cancel a run, or all elements of a sweep.

    The run saves first, if Slurm leaves it enough time. A cancelled run is not requeued; hpcddp submit --resume RUN
    continues it. If the run has already ended, the command says so and exits with 0; what a killed batch script has
    left on this machine receives SIGTERM.

    Example: hpcddp cancel 20261121-1545
    """
    from hpcddp.manage.control import cancel as cancel_run
    from hpcddp.manage.control import cancel_sweep
    from hpcddp.manage.overview import entry_of, overview_now
    from hpcddp.manage.status import RunStatus
    from hpcddp.slurm import commands
    from hpcddp.submission.sweep_element import chosen_to_act_on

    environment = dict(os.environ)
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


def _print(run_id: str, sentence: str, *, as_json: bool) -> None:
    echo(json.dumps({"run_id": run_id, "sentence": sentence}, indent=2) if as_json else sentence)
