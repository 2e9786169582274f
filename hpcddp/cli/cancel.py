"""``hpcddp cancel``."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence

import typer

from hpcddp.cli.options import RUN_ROOT, AsJson, Run, RunRoot, Yes, confirm
from hpcddp.cli.output import echo


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(cancel)


def cancel(
    run: Run = None,
    *,
    yes: Yes = False,
    run_root: RunRoot = RUN_ROOT,
    as_json: AsJson = False,
) -> None:
    """Cancel a run, or all elements of a sweep.

    The run saves first, if Slurm leaves it enough time. A cancelled run is not requeued; hpcddp submit --resume RUN
    continues it. Without RUN, the command asks before it cancels the last run. If the run has already ended, the
    command says so and exits with 0.

    Example: hpcddp cancel 20261121-1545
    """
    from hpcddp.manage.control import cancel as cancel_run
    from hpcddp.manage.control import cancel_sweep
    from hpcddp.manage.overview import entry_of, overview_of
    from hpcddp.manage.status import RunStatus
    from hpcddp.slurm import commands
    from hpcddp.submission.sweep_element import chosen_to_act_on

    environment = dict(os.environ)
    chosen = chosen_to_act_on(run, run_root)
    found = overview_of([entry_of(chosen)], ask=lambda: commands.queue(environment), now=time.time())
    (line,) = found.lines
    if run is None and (yes or line.is_alive):
        confirm("Cancel", "cancelled", line, yes=yes)

    def end(job_ids: Sequence[str]) -> None:
        commands.cancel(job_ids, environment)

    if isinstance(line, RunStatus):
        sentence, run_id = cancel_run(line, end=end), line.run.run_id
    else:
        sentence, run_id = cancel_sweep(line, end=end, now=time.time()), line.sweep.sweep_id
    echo(json.dumps({"run_id": run_id, "sentence": sentence}, indent=2) if as_json else sentence)
