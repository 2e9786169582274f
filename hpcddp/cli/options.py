"""Options and arguments that several commands share, their completion, and how a run is named in a command."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcddp import api
from hpcddp.api import default_run_root, profiles_directory
from hpcddp.errors import HpcddpError

if TYPE_CHECKING:
    from hpcddp.jobfile.cluster import ClusterFacts
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
    runs = all_runs(Path(root)) or all_runs(Path(root), everywhere=True)
    completions = []
    for run in runs:
        names = [run.run_id]
        token = token_of(run.run_id)
        # A short form is offered to those who have begun one.
        if incomplete and token != run.run_id:
            names.append(token)
        completions += [(name, brief(run)) for name in names if name.startswith(incomplete)]
    return completions


def complete_partitions(context: typer.Context, incomplete: str) -> list[str]:
    """Return the partitions that start with a text: those of the profile, else those that sinfo lists at once."""
    facts = _facts(context)
    if facts is not None:
        return _beginning_with(
            incomplete, (name for name, partition in facts.partitions.items() if not partition.hidden)
        )
    from hpcddp.slurm.commands import SlurmCommandError, partitions

    try:
        return _beginning_with(incomplete, partitions(os.environ))
    except SlurmCommandError:
        return []


def complete_accounts(context: typer.Context, incomplete: str) -> list[str]:
    """Return the user's accounts in the profile that start with a text."""
    facts = _facts(context)
    return [] if facts is None else _beginning_with(incomplete, facts.accounts.names)


def complete_qos(context: typer.Context, incomplete: str) -> list[str]:
    """Return the user's QOS in the profile that start with a text."""
    facts = _facts(context)
    return [] if facts is None else _beginning_with(incomplete, facts.accounts.qos)


def complete_gpu_types(context: typer.Context, incomplete: str) -> list[str]:
    """Return the kinds of GPU in the profile that start with a text."""
    facts = _facts(context)
    gpu_types: list[str] = []
    if facts is not None:
        for partition in facts.partitions.values():
            gpu_types += partition.gpu_types
    return _beginning_with(incomplete, gpu_types)


def complete_mail_types(incomplete: str) -> list[str]:
    """Return the types of mail that start with a text, the last of a list."""
    from hpcddp.jobfile.resources import MAIL_TYPES

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in MAIL_TYPES if name.startswith(last.upper())]


def _beginning_with(text: str, names: Iterable[str]) -> list[str]:
    return sorted({name for name in names if name.startswith(text)})


def _facts(context: typer.Context) -> ClusterFacts | None:
    """Return what the user's profile says about the cluster; None if it cannot be read: a tab reports no error."""
    from hpcddp.jobfile.profiles import read_profile

    del context
    try:
        profile = read_profile(None, profiles_directory(os.environ))
    except (HpcddpError, OSError):
        return None
    return None if profile is None else profile.cluster


RunRoot = Annotated[
    Path,
    typer.Option(
        "--run-root",
        metavar="DIR",
        help="Directory of all runs. [default: run_root of hpcddp.yaml or the profile, else runs]",
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
    int | None,
    typer.Option("--max-parallel", metavar="N", min=1, help="Largest number of runs at the same time.", hidden=True),
]
After = Annotated[
    list[str] | None,
    typer.Option("--after", metavar="RUN", help="Wait until this run has finished (Slurm); repeatable."),
]
AfterAny = Annotated[
    list[str] | None,
    typer.Option("--after-any", metavar="RUN", help="Wait until this run has ended (Slurm); repeatable.", hidden=True),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def read_sweep_options(axes: list[str] | None, file: Path | None, max_parallel: int | None) -> Sequence[Override]:
    """Return the fields that ``--sweep``, ``--sweep-file`` and ``--max-parallel`` set."""
    if not axes and file is None and max_parallel is None:
        return ()
    from hpcddp.jobfile.overrides import sweep_overrides

    return sweep_overrides(axes or (), file, max_parallel)
