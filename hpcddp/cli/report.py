"""``hpcddp report``."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcddp.cli.options import RUN_ROOT, AsJson, RunRoot, complete_runs
from hpcddp.cli.output import echo
from hpcddp.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

_PAGE_MARK = b'<meta name="generator" content="hpcddp report">'
_PAGE_HEAD_BYTES = 1024


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(report)


def report(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN",
            help="Runs or sweeps: id or a part of it, job name, Slurm job id, or directory; by default the last run.",
            autocompletion=complete_runs,
        ),
    ] = None,
    *,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the page to FILE. [default: RUN_ID-report.html]"),
    ] = None,
    sort: Annotated[
        str | None, typer.Option(metavar="METRIC", help="Rank the runs by the best value of METRIC.")
    ] = None,
    run_root: RunRoot = RUN_ROOT,
    as_json: AsJson = False,
) -> None:
    """Write a page about runs: curves, goodput, attempts, errors.

    The page is one HTML file that needs no network. It draws several runs together, and ranks the elements of a sweep.

    Example: hpcddp report 20260314-1544 -o report.html

    Example: hpcddp report --json
    """
    from hpcddp.manage.overview import SweepStatus, entry_of, overview_now
    from hpcddp.manage.report import ranked, reports_of
    from hpcddp.run.find import chosen_run

    if as_json and output is not None:
        raise UserError("--json prints numbers, and --output names the page; leave one of them out")
    names: Sequence[str | None] = runs or [None]
    chosen = dict.fromkeys(chosen_run(name, run_root) for name in names)
    overview = overview_now([entry_of(run) for run in chosen], dict(os.environ))
    if overview.unanswered is not None:
        echo(f"Slurm could not be asked, so the states are as far as files tell: {overview.unanswered}", err=True)
    reports = reports_of(overview.lines)
    if not reports:
        raise UserError("the sweep has no elements, so there is nothing to report; name another run")
    metric, ordered_reports = ranked(reports, sort)
    if as_json:
        ranked_by = metric if len(reports) > 1 else None
        document = {"ranked_by": ranked_by, "runs": [report.as_json() for report in ordered_reports]}
        echo(json.dumps(document, indent=2))
        return
    from hpcddp.manage.report_page import page

    sweep = None
    if len(overview.lines) == 1 and isinstance(overview.lines[0], SweepStatus):
        sweep = overview.lines[0].sweep
    first_run = reports[0].run.path
    run_or_sweep_id = first_run.name if sweep is None else sweep.sweep_id
    title = f"{first_run.parent.name} / {run_or_sweep_id}"
    if len(overview.lines) > 1:
        title += f" and {len(overview.lines) - 1} more"
    page_name = f"{run_or_sweep_id}-report.html"
    if sweep is None and len(reports) > 1:
        page_name = f"{run_or_sweep_id}-and-{len(reports) - 1}-more-report.html"
    path = output or Path(page_name)
    _refuse_unwritable(path)
    _write(path, page(ordered_reports, metric=metric, title=title, now=time.time(), is_sweep=sweep is not None))
    echo(str(path))


def _refuse_unwritable(path: Path) -> None:
    if path.is_dir():
        raise UserError(f"--output is {path}, which is a directory; write the name of a file in it")
    if not path.parent.is_dir():
        raise UserError(
            f"--output is {path}, and the directory {path.parent} does not exist; make it, or write another file"
        )
    if os.path.lexists(path) and not _is_page(path):
        raise UserError(
            f"--output is {path}, which exists and is no page of hpcddp report; write another file, or remove this one"
        )


def _is_page(path: Path) -> bool:
    """Return whether a file is a page that this command has written."""
    from hpcddp.run.files import open_regular

    try:
        with open_regular(path) as (stream, _):
            return _PAGE_MARK in stream.read(_PAGE_HEAD_BYTES)
    except OSError:
        return False


def _write(path: Path, text: str) -> None:
    from hpcddp.run.files import write_text

    try:
        write_text(path, text)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); write another file with --output") from error
