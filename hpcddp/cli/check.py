"""``hpcddp check``."""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcddp.cli.options import AsJson, Overrides
from hpcddp.cli.output import Role, echo, styled, write
from hpcddp.errors import UserError, counted, printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpcddp.check.check import Report
    from hpcddp.check.finding import Finding

_FOUND = 2


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(check)


def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A job file (YAML), or a script for sbatch.")],
    *,
    overrides: Overrides = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Repair in the script what is mechanical; print the change.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Find what is wrong with a job before it waits in the queue.

    Looks at the script, the job, this machine, and the cluster where Slurm is found, and prints for each finding what
    happens otherwise and what to write instead. Nothing is submitted. A comment in the file ignores a finding, on its
    line or the line above: # hpcddp: ignore CODE

    The exit code is 0 without errors and warnings, else 2.

    Example: hpcddp check job.yaml

    Example: hpcddp check train.sbatch --fix
    """
    from hpcddp.check.check import check_file

    change = _repair(file) if fix else ""
    report = check_file(file, overrides, dict(os.environ))
    if as_json:
        echo(json.dumps({**report.as_json(), "change": change or None}, indent=2))
    else:
        echo(change, nl=False)
        for finding in report.findings:
            _print_finding(finding)
        echo("\n".join(_summary(report)))
    raise typer.Exit(_FOUND if report.fails else 0)


def _repair(file: Path) -> str:
    """Write the mechanical repairs into a script, and return the change as ``diff -u`` shows it."""
    from hpcddp.check.check import is_script, read_file, repaired
    from hpcddp.run.files import write_through_link

    text = read_file(file)
    if not is_script(file, text):
        raise UserError(f"--fix repairs a script, and {file} is a job file; change it as the findings say")
    after = repaired(text, Path.cwd(), dict(os.environ))
    if after == text:
        return ""
    mode = file.stat().st_mode
    write_through_link(file, after)
    file.chmod(mode & 0o7777)
    lines = difflib.unified_diff(
        text.splitlines(keepends=True), after.splitlines(keepends=True), str(file), f"{file} (repaired)"
    )
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


_ROLES: dict[str, Role] = {"error": "bad", "warning": "waiting", "note": "quiet"}


def _print_finding(finding: Finding) -> None:
    severity = finding.rule.severity.value
    write(f"{printable(finding.location)}: {styled(severity, _ROLES[severity])} {styled(finding.rule.code, 'name')}")
    echo(f"    {finding.hit.problem}")
    echo(f"    otherwise: {finding.rule.otherwise}")
    instead = finding.hit.fix
    if finding.hit.edits:
        instead += " (--fix does it)"
    echo(f"    instead: {instead}")


def _summary(report: Report) -> Iterator[str]:
    from hpcddp.check.finding import Severity

    counts = [counted(count, severity.value) for severity in Severity if (count := report.count(severity))]
    yield f"{report.file}: {', '.join(counts) or 'nothing found'}"
    yield from report.not_checked
    if report.start is not None:
        yield f"Slurm would take it now: {report.start}"
