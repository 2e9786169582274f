"""Options that several commands share, as annotated types."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcddp.errors import HpcddpError, UserError

if TYPE_CHECKING:
    from hpcddp.jobfile.cluster import Cluster, ClusterFacts
    from hpcddp.jobfile.overrides import Override
    from hpcddp.jobfile.problems import Problem
    from hpcddp.jobfile.read import DefaultSettings, ResolvedJob
    from hpcddp.submit.request import SubmitRequest

JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="The job file (YAML).")]
JobFileOrNone = Annotated[
    Path | None, typer.Argument(metavar="JOB", help="The job file (YAML); not needed with a command.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY.PATH=VALUE", help="Override a field of the job file; repeatable."),
]
RUN_ROOT = Path("runs")
"""The default directory of all runs."""


def default_run_root() -> Path:
    """Return the default of ``--run-root``: ``run_root`` of ``hpcddp.toml`` or the profile, else ``runs``.

    Raises:
        JobFileError: one of these files cannot be used.
    """
    from hpcddp.jobfile.read import shared_run_root

    return Path(shared_run_root(defaults_of_process()) or RUN_ROOT)


def run_argument(run: Path) -> str:
    """Return the RUN argument for a run directory: the id if the run is in the default root, else the path."""
    try:
        root = default_run_root().absolute()
    except HpcddpError:
        return str(run)
    return run.name if run.parent.parent == root else str(run)


def _chosen_root(context: typer.Context, root: Path) -> Path:
    source = context.get_parameter_source("run_root")
    return default_run_root() if source is not None and source.name == "DEFAULT" else root


def complete_runs(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the run ids that start with a text, each with its job's name and its state on disk, for the shell."""
    from hpcddp.run.find import all_runs, brief

    root = context.params.get("run_root") or RUN_ROOT
    return [(run.run_id, brief(run)) for run in all_runs(Path(root)) if run.run_id.startswith(incomplete)]


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
    kinds = () if facts is None else (kind for partition in facts.partitions.values() for kind in partition.kinds)
    return _beginning_with(incomplete, (gpu for kind in kinds for gpu in kind.gpu_types))


def complete_mail_types(incomplete: str) -> list[str]:
    """Return the types of mail that start with a text, the last of a list."""
    from hpcddp.jobfile.resources import MAIL_TYPES

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in MAIL_TYPES if name.startswith(last.upper())]


def _beginning_with(text: str, names: Iterable[str]) -> list[str]:
    return sorted({name for name in names if name.startswith(text)})


def _facts(context: typer.Context) -> ClusterFacts | None:
    """Return what the user's profile says about the cluster; None if it cannot be read: a tab reports no error."""
    from hpcddp.jobfile.profiles import SettingsError, read_profile

    del context
    try:
        profile = read_profile(None, profiles_directory(os.environ))
    except (SettingsError, HpcddpError, OSError):
        return None
    return None if profile is None else profile.cluster


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
        help="Run id, the start of one, or run directory; without it, the last run.",
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
    typer.Option("--max-parallel", metavar="N", min=1, help="Runs of a sweep at the same time.", hidden=True),
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


def profiles_directory(environment: Mapping[str, str]) -> Path:
    """Return the directory of the user's cluster profiles (XDG Base Directory Specification)."""
    configuration = environment.get("XDG_CONFIG_HOME") or _home(environment) / ".config"
    return Path(configuration) / "hpcddp" / "profiles"


def _home(environment: Mapping[str, str]) -> Path:
    try:
        return Path(environment.get("HOME") or Path.home())
    except RuntimeError:
        raise UserError(
            f"HOME is not set, and user {os.getuid()} has no home directory in the user database; set HOME, or "
            "XDG_CONFIG_HOME"
        ) from None


def read_job(
    job_file: Path | None, overrides: Sequence[str] | None, *, options: Sequence[Override | Problem] = ()
) -> ResolvedJob:
    """Read a job with the default settings of ``hpcddp.toml`` and the user's profiles.

    Args:
        job_file: the job file; None if the options describe the whole job.
        overrides: the values of ``--set``.
        options: the fields that other options set.

    Raises:
        JobFileError: with every problem of the files and options.
    """
    from hpcddp.jobfile.read import load_job

    return load_job(job_file, overrides=overrides or (), options=options, defaults=defaults_of_process())


def defaults_of_process() -> DefaultSettings:
    """Return the locations of default settings for this user and working directory."""
    from hpcddp.jobfile.profiles import find_project_file
    from hpcddp.jobfile.read import DefaultSettings

    directory, home = Path.cwd(), os.environ.get("HOME")
    return DefaultSettings(
        profiles=profiles_directory(os.environ),
        project=find_project_file(directory, home=Path(home) if home else None),
        directory=directory,
        user_id=os.geteuid(),
    )


def read_sweep(axes: list[str] | None, file: Path | None, max_parallel: int | None) -> Sequence[Override]:
    """Return the fields that ``--sweep``, ``--sweep-file`` and ``--max-parallel`` set."""
    if not axes and file is None and max_parallel is None:
        return ()
    from hpcddp.jobfile.overrides import sweep_overrides

    return sweep_overrides(axes or (), file, max_parallel)


def submit_request(
    job: ResolvedJob,
    *,
    run_id: str | None,
    cluster: Cluster = "slurm",
    template: str | None,
    environment: Mapping[str, str],
    dependency: str | None = None,
) -> SubmitRequest:
    """Return the request to submit a job, or to render its script, from the working directory."""
    from hpcddp.submit.request import SubmitRequest

    return SubmitRequest(
        job=job,
        run_id=run_id,
        cluster=cluster,
        python=job.spec.environment.python or sys.executable,
        template=template,
        directory=Path.cwd(),
        environment=environment,
        dependency=dependency,
    )
