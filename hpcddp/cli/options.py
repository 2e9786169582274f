"""Options that several commands share, as annotated types."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from hpcddp.errors import HpcddpError

JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="The job file (YAML).")]
JobFileOrNone = Annotated[
    Path | None, typer.Argument(metavar="JOB", help="The job file (YAML); not needed with a command.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY.PATH=VALUE", help="Override a field of the job file; repeatable."),
]


RUN_ROOT = Path("runs")
"""Where runs live unless somebody says otherwise."""


def run_root_here() -> Path:
    """Return where commands look for runs that are not told: as ``hpcddp.toml`` or the profile says, else ``runs``.

    Raises:
        JobFileError: one of these files cannot be used.
    """
    from hpcddp.cli.jobs import underlay_here
    from hpcddp.spec.read import shared_run_root

    return Path(shared_run_root(underlay_here()) or RUN_ROOT)


def word_for(run: Path) -> str:
    """Return what a command calls a run so that it finds it from here: its id, or the path where ids are elsewhere.

    Args:
        run: the directory of a run or a sweep, absolute.
    """
    try:
        root = run_root_here().absolute()
    except HpcddpError:
        return str(run)
    return run.name if run.parent.parent == root else str(run)


def _chosen_root(context: typer.Context, root: Path) -> Path:
    source = context.get_parameter_source("run_root")
    return run_root_here() if source is not None and source.name == "DEFAULT" else root


def complete_runs(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the run ids that begin so, for the shell, each with its name and what came of it; nobody is asked."""
    from hpcddp.run.find import all_runs, brief

    root = context.params.get("run_root") or RUN_ROOT
    return [(run.run_id, brief(run)) for run in all_runs(Path(root)) if run.run_id.startswith(incomplete)]


RunRoot = Annotated[
    Path,
    typer.Option(
        "--run-root",
        metavar="DIR",
        help="Where runs live, to look for an id. [default: run_root of hpcddp.toml or the profile, else runs]",
        show_default=False,
        callback=_chosen_root,
    ),
]
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
