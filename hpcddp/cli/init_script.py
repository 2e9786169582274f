"""``hpcddp init --from SCRIPT``: a job file from an sbatch script, and what became of each line."""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from hpcddp.cli.output import echo
from hpcddp.errors import UserError, counted, printable

if TYPE_CHECKING:
    from hpcddp.script.convert import Conversion
    from hpcddp.script.draft import Outcome, Row

_WIDTH_OF_A_FILE: Final = 140
_LABELS: Final[Mapping[Outcome, str]] = MappingProxyType(
    {"taken": "taken", "setup": "setup line", "dropped": "dropped", "open": "to do"}
)


class JobOfScriptError(UserError):
    """No job file can be written for a script."""

    kind = "init"


def write_job_of_script(script: Path, job_file: Path | None, *, force: bool, dry_run: bool, as_json: bool) -> None:
    """Write a job file for an sbatch script, and print it with what became of each line.

    Args:
        job_file: the job file; None is the script's name with .yaml, in this directory.
        force: whether an existing job file is replaced.
        dry_run: whether nothing is written.
        as_json: whether one JSON document is printed.

    Raises:
        UserError: the script cannot be read or converted, or the job file cannot be written.
    """
    from hpcddp.script.convert import ConversionError, convert
    from hpcddp.script.parse import read_script

    target = Path(f"{script.stem}.yaml") if job_file is None else job_file
    if os.path.lexists(target) and not (force or dry_run):
        raise JobOfScriptError(f"{target} is there already; add --force to write it anew, or name another file: --job")
    try:
        conversion = convert(read_script(script), name=script.stem, environment=os.environ)
    except ConversionError as error:
        raise JobOfScriptError(f"{script}: {error.message}") from None
    text = f"# Made from {printable(script.name)} by hpcddp init --from.\n{conversion.text}"
    if not dry_run:
        _save(target, text)
    next_command = shlex.join(["hpcddp", "submit", str(target)])
    if as_json:
        document = {
            "script": str(script),
            "job_file": str(target),
            "written": not dry_run,
            "text": text,
            "rows": [_row_document(row) for row in conversion.rows],
            "added": list(conversion.added),
            "next": next_command,
        }
        echo(json.dumps(document, indent=2))
        return
    echo(text)
    echo(_table(conversion))
    echo("\n".join(_summary(conversion, target, next_command, dry_run=dry_run)))


def _save(target: Path, text: str) -> None:
    from hpcddp.run.files import write_through_link

    try:
        write_through_link(target, text)
    except OSError as error:
        raise JobOfScriptError(
            f"{target} cannot be written ({error.strerror}); name another file with --job, or print it with --dry-run"
        ) from None


def _row_document(row: Row) -> dict[str, object]:
    return {
        "line": row.line,
        "text": row.text,
        "outcome": row.outcome,
        "field": None if row.key is None else ".".join(row.key),
        "reason": row.reason,
    }


def _table(conversion: Conversion) -> str:
    """Return the rows as a table that fits the terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column("line", justify="right", no_wrap=True)
    table.add_column("script", overflow="fold", ratio=2)
    table.add_column("", no_wrap=True)
    table.add_column("in the job file, or why not", overflow="fold", ratio=3)
    for row in conversion.rows:
        text = printable(row.text)
        first, line_break, _ = text.partition("\n")
        shown = f"{first} ..." if line_break else first
        reason = row.reason or ".".join(row.key or ())
        table.add_row(str(row.line), Text(shown), _LABELS[row.outcome], Text(printable(reason)))
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDTH_OF_A_FILE
    buffer = io.StringIO()
    Console(file=buffer, width=width, color_system=None, highlight=False).print(table)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())


def _summary(conversion: Conversion, target: Path, next_command: str, *, dry_run: bool) -> Iterator[str]:
    counts = Counter(row.outcome for row in conversion.rows)
    yield ""
    setup_lines = counted(counts["setup"], "setup line")
    yield f"lines          {counts['taken']} taken, {setup_lines}, {counts['dropped']} dropped, {counts['open']} to do"
    if conversion.added:
        yield f"hpcddp adds    {' '.join(conversion.added)}"
    if dry_run:
        yield f"job file       {target}, not written (--dry-run)"
    else:
        yield f"job file       {target}"
    if counts["open"]:
        yield f"next           look at the lines that are to do, then: {next_command}"
    else:
        yield f"next           {next_command}"
