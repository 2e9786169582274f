"""``hpcddp stacks``."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Annotated

import typer

from hpcddp.cli.options import RUN_ROOT, AsJson, Run, RunRoot
from hpcddp.cli.output import echo


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(stacks)


def stacks(
    run: Run = None,
    *,
    rank: Annotated[list[int] | None, typer.Option(metavar="R", help="Print only this rank; repeatable.")] = None,
    run_root: RunRoot = RUN_ROOT,
    as_json: AsJson = False,
) -> None:
    """Print where every rank of a running job is, as Python stacks.

    Equal stacks are printed once. The job continues. Processes that a rank has started, such as the workers of a
    DataLoader, follow the ranks. A training and an entrypoint answer by themselves, even in a
    collective that hangs. The program of a command needs py-spy in the environment of the job: pip install py-spy. If
    no stack can be read, the exit code is 1.

    Example: hpcddp stacks 20260314-1544
    """
    from hpcddp.manage.live import live_run
    from hpcddp.manage.live import stacks as stacks_of
    from hpcddp.manage.overview import one_run, status_now
    from hpcddp.manage.stack_groups import group_stacks, summary
    from hpcddp.submission.sweep_element import chosen_to_act_on

    environment = dict(os.environ)
    directory = one_run(chosen_to_act_on(run, run_root))
    live = live_run(status_now(directory, environment))
    ranks = rank or ()
    for number in ranks:
        live.check_rank(number)
    processes = stacks_of(live, environment)
    if ranks:
        processes = [process for process in processes if process.rank in ranks]
    if as_json:
        documents = [asdict(process) for process in processes]
        echo(json.dumps({"run_id": directory.run_id, "processes": documents}, indent=2))
    elif processes:
        groups = group_stacks(processes)
        where = summary(groups)
        if where and len(processes) > 1:
            echo(f"{where}\n")
        for group in groups:
            echo("".join(f"{line}\n" for line in group.lines()))
    else:
        echo(
            f"no process of run {directory.run_id} was found on its nodes; it may just have started or ended", err=True
        )
    if not any(process.is_known for process in processes):
        raise typer.Exit(1)
