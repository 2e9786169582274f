"""``hpcddp requeue``."""

from __future__ import annotations

import json
import os

import typer

from hpcddp.cli.options import RUN_ROOT, AsJson, Run, RunRoot
from hpcddp.cli.output import echo
from hpcddp.errors import HpcddpError


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(requeue)


def requeue(run: Run = None, *, run_root: RunRoot = RUN_ROOT, as_json: AsJson = False) -> None:
    """Save a run that runs on Slurm, and start it again.

    The run then uses new code and gets its whole time limit again. A training stops at the end of a step, saves a
    checkpoint, and continues under the same job id. A command gets SIGTERM and the seconds that Slurm leaves it. For
    a sweep, every running element is requeued. hpcddp submit --resume RUN continues a run that has ended.

    Example: hpcddp requeue 20261121-1545
    """
    from hpcddp.manage.control import commands_of_slurm
    from hpcddp.manage.control import requeue as requeue_run
    from hpcddp.manage.overview import entry_of, overview_now
    from hpcddp.manage.status import RunStatus
    from hpcddp.submission.sweep_element import chosen_to_act_on

    environment = dict(os.environ)
    chosen = chosen_to_act_on(run, run_root)
    overview = overview_now([entry_of(chosen)], environment)
    if overview.unanswered is not None:
        raise HpcddpError(f"nothing was requeued, because Slurm could not be asked: {overview.unanswered}")
    (line,) = overview.lines
    slurm = commands_of_slurm(environment)
    if isinstance(line, RunStatus):
        sentences = {line.run.run_id: requeue_run(line, slurm)}
    else:
        running = [element for element in line.elements if element.state == "running"]
        sentences = {element.run.run_id: requeue_run(element, slurm) for element in running}
    if as_json:
        documents = [{"run_id": run_id, "sentence": sentence} for run_id, sentence in sentences.items()]
        echo(json.dumps(documents, indent=2))
        return
    echo("\n".join(sentences.values()) or "no element of the sweep runs, so none was requeued")
