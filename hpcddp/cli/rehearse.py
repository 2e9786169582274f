"""The command ``hpcddp rehearse``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcddp.cli.command_words import JobCommand, job_arguments
from hpcddp.cli.options import AsJson, JobFileOrNone, Overrides
from hpcddp.cli.output import echo
from hpcddp.errors import UserError

if TYPE_CHECKING:
    from hpcddp.rehearse.plan import Place


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(cls=JobCommand)(rehearse)


class _ClusterChoice(StrEnum):
    """The values of ``--cluster``."""

    LOCAL = "local"
    SLURM = "slurm"


def _complete_faults(incomplete: str) -> list[str]:
    from hpcddp.rehearse.rehearsal import FAULTS_IN

    names = {fault.name for faults in FAULTS_IN.values() for fault in faults}
    return sorted(name for name in names if name.startswith(incomplete))


def rehearse(  # noqa: PLR0913  each is an option
    context: typer.Context,
    job_file: JobFileOrNone = None,
    *,
    cluster: Annotated[
        _ClusterChoice,
        typer.Option(metavar="WHERE", help="local, or slurm: requeue a job of two nodes once."),
    ] = _ClusterChoice.LOCAL,
    sandbox: Annotated[bool, typer.Option("--sandbox", help="Add the faults of a real Slurm on two hosts.")] = False,
    overrides: Overrides = None,
    faults: Annotated[
        list[str] | None,
        typer.Option("--fault", metavar="NAME", help="Only this fault; repeatable.", autocompletion=_complete_faults),
    ] = None,
    linked: Annotated[
        list[Path] | None,
        typer.Option("--link", metavar="PATH", help="Data that git ignores; repeatable."),
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=1, help="Longest time of one attempt.")] = 300,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before jobs go to the cluster.", hidden=True)] = False,
    keep: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep the runs in this new directory.")] = None,
    as_json: AsJson = False,
) -> None:
    """Try whether a job comes back from faults, before it must.

    The job runs small on this machine: once without a fault, then under each fault, from preemption to cancel, after
    which it is resumed and compared. The exit code is 0 if it comes back equal from all, 1 if not.

    Example: hpcddp rehearse job.yaml

    Example: hpcddp rehearse --tasks-per-node 2 -- python train.py --epochs 2
    """
    from hpcddp.rehearse.rehearsal import choose_faults, lines_of, sandbox_of_two_hosts
    from hpcddp.rehearse.rehearsal import rehearse as rehearse_job

    faults_by_place = choose_faults(faults or (), _places(cluster, sandbox=sandbox))
    job = job_arguments(context).load(job_file, overrides=overrides)
    environment = dict(os.environ)
    if "cluster" in faults_by_place:
        _agree_to_spend(environment, yes=yes)
    reports = []
    for place, faults_of_place in faults_by_place.items():
        directory_to_keep = keep
        if keep is not None and len(faults_by_place) > 1:
            directory_to_keep = keep / place
        environment_of_place: AbstractContextManager[Mapping[str, str]] = nullcontext(environment)
        if place == "sandbox":
            environment_of_place = sandbox_of_two_hosts(environment)
        with environment_of_place as variables:
            report = rehearse_job(
                job,
                place=place,
                faults=faults_of_place,
                directory=Path.cwd(),
                linked=linked or (),
                keep=directory_to_keep,
                python=job.spec.environment.interpreter or sys.executable,
                environment=variables,
                timeout_s=timeout,
                say=lambda line: echo(line, err=True),
            )
        reports.append(report)
        if not as_json:
            for line in lines_of(report):
                echo(line)
    is_good = all(report.is_good for report in reports)
    if as_json:
        document = {"ok": is_good, "rehearsals": [report.as_json() for report in reports]}
        echo(json.dumps(document, indent=2))
    raise typer.Exit(0 if is_good else 1)


def _places(cluster: _ClusterChoice, *, sandbox: bool) -> list[Place]:
    if cluster is _ClusterChoice.LOCAL:
        return ["here", "sandbox"] if sandbox else ["here"]
    if sandbox:
        raise UserError(
            "--sandbox is a Slurm of this machine, and --cluster slurm is the cluster; leave one of them out"
        )
    return ["cluster"]


def _agree_to_spend(environment: Mapping[str, str], *, yes: bool) -> None:
    """Ask before jobs go to the cluster.

    Raises:
        UserError: there is no Slurm, or the user does not agree.
    """
    from hpcddp.submission.submit import choose_cluster

    choose_cluster("slurm", environment)
    if yes:
        return
    what = "two jobs of two nodes and at most ten minutes go to the cluster, one after the other"
    if not sys.stdin.isatty():
        raise UserError(f"{what}; repeat the command with --yes if that is meant")
    if not typer.confirm(f"{what[0].upper()}{what[1:]}. Submit them?", err=True):
        raise UserError("nothing was submitted; without --cluster slurm the rehearsal runs on this machine")
