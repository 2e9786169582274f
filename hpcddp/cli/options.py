"""Options that several commands share, as annotated types."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="The job file (YAML).")]
JobFileOrNone = Annotated[
    Path | None, typer.Argument(metavar="JOB", help="The job file (YAML); not needed with a command.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY.PATH=VALUE", help="Override a field of the job file; repeatable."),
]


def complete_runs(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the run ids that begin so, for the shell, each with its name and what came of it; nobody is asked."""
    from hpcddp.run.find import all_runs, brief

    root = context.params.get("run_root") or RUN_ROOT
    return [(run.run_id, brief(run)) for run in all_runs(Path(root)) if run.run_id.startswith(incomplete)]


RUN_ROOT = Path("runs")
"""Where runs live unless somebody says otherwise."""

RunRoot = Annotated[Path, typer.Option("--run-root", metavar="DIR", help="Where runs live, to look for an id.")]
Run = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        help="Its id, the beginning of it, or its directory; the last run if left out.",
        autocompletion=complete_runs,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def profiles_directory(environment: Mapping[str, str]) -> Path:
    """Return where the user's cluster profiles are (XDG Base Directory Specification)."""
    configuration = environment.get("XDG_CONFIG_HOME") or Path(environment.get("HOME") or "~").expanduser() / ".config"
    return Path(configuration) / "hpcddp" / "profiles"
