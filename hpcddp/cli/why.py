"""``hpcddp why``."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import typer

from hpcddp.cli.options import RUN_ROOT, AsJson, Run, RunRoot, run_argument
from hpcddp.cli.output import echo

if TYPE_CHECKING:
    from hpcddp.manage.why import Answer, SweepAnswer


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(why)


def why(run: Run = None, *, run_root: RunRoot = RUN_ROOT, as_json: AsJson = False) -> None:
    """Explain why a run waits, how far it is, or why it ended.

    The command also prints what to do next. For a run that waits, it explains Slurm's reason and prints when Slurm
    expects to start the run.

    Example: hpcddp why
    """
    from hpcddp.manage.overview import entry_of, overview_now
    from hpcddp.manage.status import RunStatus
    from hpcddp.manage.why import explain, explain_sweep
    from hpcddp.run.find import chosen_run
    from hpcddp.slurm.commands import priority
    from hpcddp.slurm.job import State

    environment = dict(os.environ)
    entry = entry_of(chosen_run(run, run_root))
    overview = overview_now([entry], environment)
    (line,) = overview.lines
    unanswered = overview.unanswered is not None
    if isinstance(line, RunStatus):
        called = run_argument(line.run.path)
        priority_lines = None
        if line.job is not None and line.state in {State.PENDING, State.REQUEUED}:
            priority_lines = priority(line.job.job_id, environment)
        answer: Answer | SweepAnswer = explain(line, priority=priority_lines, unanswered=unanswered, called=called)
    else:
        answer = explain_sweep(line, unanswered=unanswered, called=run_argument(line.sweep.path))
    if overview.unanswered is not None:
        echo(f"Slurm could not be asked: {overview.unanswered}", err=True)
    echo(json.dumps(answer.as_json(), indent=2) if as_json else "\n".join(answer.lines()))
