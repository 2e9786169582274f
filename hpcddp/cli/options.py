"""Options that several commands share, as annotated types."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcddp import api
from hpcddp.api import default_run_root
from hpcddp.errors import HpcddpError

if TYPE_CHECKING:
    from hpcddp.jobfile.overrides import Override
    from hpcddp.run.directory import RunDirectory

JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="The job file (YAML).")]
JobFileOrNone = Annotated[
    Path | None, typer.Argument(metavar="JOB", help="The job file (YAML); not needed with a command.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY.PATH=VALUE", help="Override a field of the job file; repeatable."),
]
RUN_ROOT = api.RUN_ROOT
"""The default directory of all runs."""


def run_argument(run: Path) -> str:
    """Return the RUN argument for a run directory: the id if the run is in the default root, else the path."""
    try:
        root = default_run_root().absolute()
    except HpcddpError:
        return str(run)
    return run.name if run.parent.parent == root else str(run)


def short_argument(run: RunDirectory) -> str:
    """Return the shortest RUN argument for a run: the random letters of its id if they name it, else its path."""
    from hpcddp.run.find import find_run, token_of

    token = token_of(run.run_id)
    with suppress(HpcddpError):
        if find_run(token, default_run_root()).path == run.path:
            return token
    return str(run.path)


def _chosen_root(context: typer.Context, root: Path) -> Path:
    source = context.get_parameter_source("run_root")
    return default_run_root() if source is not None and source.name == "DEFAULT" else root


def complete_runs(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the run ids, or their short forms, that start with a text, each with its job's name and its state on disk.

    For the shell, which offers nothing that starts with another text.
    """
    from hpcddp.run.find import all_runs, brief, token_of

    root = context.params.get("run_root") or RUN_ROOT
    found = all_runs(Path(root)) or all_runs(Path(root), everywhere=True)
    names = [(name, run) for run in found for name in dict.fromkeys((run.run_id, token_of(run.run_id)))]
    # The short forms are offered to who has begun one.
    names = [(name, run) for name, run in names if name.startswith(incomplete) and (incomplete or name == run.run_id)]
    return [(name, brief(run)) for name, run in names]


RunRoot = Annotated[
    Path,
    typer.Option(
        "--run-root",
        metavar="DIR",
        help="Directory of all runs. [default: run_root of hpcddp.toml or the profile, else runs]",
        show_default=False,
        callback=_chosen_root,
    ),
]
Run = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        help="Run id or a part of it, job name, Slurm job id, last, or run directory; without it, the last run.",
        autocompletion=complete_runs,
    ),
]
SweepOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--sweep",
        metavar="KEY=VALUES",
        help="One run per value: train.seed=0..4; repeatable.",
    ),
]
SweepFile = Annotated[
    Path | None,
    typer.Option(
        "--sweep-file",
        metavar="FILE",
        help="File with a run per row (CSV) or list item (YAML, JSON).",
        hidden=True,
    ),
]
MaxParallel = Annotated[
    int | None, typer.Option("--max-parallel", metavar="N", min=1, help="Runs of a sweep at the same time.")
]
After = Annotated[
    list[str] | None,
    typer.Option("--after", metavar="RUN", help="Start when this run or sweep has finished."),
]
AfterAny = Annotated[
    list[str] | None,
    typer.Option("--after-any", metavar="RUN", help="Start when this run has ended, finished or not.", hidden=True),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def read_sweep(axes: list[str] | None, file: Path | None, max_parallel: int | None) -> Sequence[Override]:
    """Return the fields that ``--sweep``, ``--sweep-file`` and ``--max-parallel`` set."""
    if not axes and file is None and max_parallel is None:
        return ()
    from hpcddp.jobfile.overrides import sweep_overrides

    return sweep_overrides(axes or (), file, max_parallel)
