"""``hpcddp doctor loss``, ``hpcddp doctor ddp`` and ``hpcddp doctor install``."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcddp.api import read_job
from hpcddp.cli.options import RUN_ROOT, AsJson, JobFile, Overrides, RunRoot
from hpcddp.cli.output import echo

if TYPE_CHECKING:
    from hpcddp.doctor.install import Finding
    from hpcddp.jobfile.job import JobSpec

doctor = typer.Typer(
    name="doctor",
    help="""Examine a loss, a training, or the installation.

    Example: hpcddp doctor loss losses:dice_loss

    Example: hpcddp doctor ddp job.yaml

    Example: hpcddp doctor install --on-nodes
    """,
    rich_markup_mode=None,
    no_args_is_help=True,
)


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.add_typer(doctor)


@doctor.command()
def ddp(
    job_file: JobFile,
    *,
    overrides: Overrides = None,
    world_size: Annotated[
        int | None, typer.Option(metavar="W", help="Ranks.  [default: the job's, 2 at least and 4 at most]")
    ] = None,
    steps: Annotated[int, typer.Option(metavar="K", min=1, help="Optimizer steps to compare.")] = 3,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, help="Time limit of each of the two trainings.")
    ] = 300,
    as_json: AsJson = False,
) -> None:
    """Train a few steps in one process and on W ranks.

    It prints what differs first, and by how much: the initial values, the samples of a step, its averaged gradients, or
    the parameters on other ranks. The model, data and loss of the job run on this machine's CPUs, in float64 and with
    the same global batches of at most 32 samples. Each process has the environment of a rank (RANK, WORLD_SIZE,
    SLURM_PROCID and so on), with a world size of W or 1. Dropout and local BatchNorm are disabled during the
    comparison. The command needs neither a GPU nor Slurm.

    The exit code is 0 if both train the same, 1 for a defect, and 2 without a result: the job could not run, or it
    draws random numbers outside of dropout.

    Example: hpcddp doctor ddp job.yaml --world-size 2 --steps 1
    """
    from hpcddp.doctor.ddp.compare import examine_job

    spec = read_job(job_file, overrides).spec
    comparison = examine_job(
        spec,
        world_size=world_size,
        steps=steps,
        directory=Path.cwd(),
        environment=os.environ,
        timeout_s=timeout,
    )
    if as_json:
        echo(json.dumps(comparison.as_json(), indent=2))
    else:
        echo(comparison.explain(), nl=False)
    raise typer.Exit(1 if comparison.defect else 0)


@doctor.command()
def loss(
    name: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="loss(outputs, targets) -> scalar; a class or a function without parameters is called to create it.",
        ),
    ],
    *,
    world_size: Annotated[int, typer.Option(metavar="W", help="Ranks that would share a batch.")] = 4,
    batch: Annotated[
        int | None, typer.Option(metavar="B", help="Samples of the global batch.  [default: 32, or what --data has]")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION|FILE",
            help="Your own batches: a function that returns (outputs, targets) or a list of such pairs, or a file "
            "with them, written by torch.save. Everything that has one entry per sample is split.  "
            "[default: plain batches]",
        ),
    ] = None,
    batch_dim: Annotated[
        int, typer.Option(metavar="D", min=0, help="Dimension of samples in the outputs of --data: 1 for [T, N, C].")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Check whether a loss has the same value on W ranks as on one.

    It also prints the size of the difference and the helpers that remove it. The loss runs in this process, on batches
    and on their parts: even, uneven, permuted. The command compares values and gradients in float64 with
    f(batch) = sum over shares of n_r/b * f(share). It takes seconds and needs no GPU.

    Without --data, the loss gets plain random batches: logits and class indices, logits and 0/1 masks, values and
    values. Of those that it accepts, the worst verdict counts.

    The exit code is 0 for MEAN; 1 for what plain DDP gets wrong: SUM (the gradient is W times too small), WEIGHTED
    MEAN, NOT DECOMPOSABLE; 2 if the loss cannot be judged: it could not run, calls collectives, draws random numbers,
    or depends on the calls before.

    Example: hpcddp doctor loss losses:dice_loss --world-size 8 --batch 256
    """
    # What the loss prints is not part of the result.
    with contextlib.redirect_stdout(io.StringIO()):
        from hpcddp.doctor.loss.examination import as_json as document_of
        from hpcddp.doctor.loss.examination import examine, explain

        examination = examine(
            name, world_size=world_size, samples=batch, data=data, directory=Path.cwd(), batch_dim=batch_dim
        )
    document = document_of(examination)
    if as_json:
        echo(json.dumps(document, indent=2))
    else:
        echo(explain(examination), nl=False)
    raise typer.Exit(1 if document["defect"] else 0)


@doctor.command()
def install(
    *,
    on_nodes: Annotated[bool, typer.Option("--on-nodes", help="Also run a job of two minutes on two nodes.")] = False,
    overrides: Overrides = None,
    wait: Annotated[float, typer.Option(metavar="SECONDS", min=1, help="How long --on-nodes waits for nodes.")] = 600,
    run_root: RunRoot = RUN_ROOT,
    as_json: AsJson = False,
) -> None:
    """Check what runs need on this machine, and on the nodes.

    It prints a line for each check: verdict, subject, what was found, and what to do. The command checks the
    interpreter, Slurm, the file system of the run root, and torch with CUDA or ROCm if it is installed. With
    --on-nodes, a short job also checks whether the nodes share the run root, reach each other's free ports, and agree
    on the time. The job has the resources of the profile and of hpcddp.yaml; --set changes them.

    The exit code is 1 if a check found an error. A warning names something that may prevent runs.

    Example: hpcddp doctor install

    Example: hpcddp doctor install --on-nodes --json
    """
    from hpcddp.jobfile.overrides import read_options

    job = None
    if on_nodes:
        # Read before anything is measured, because it may be wrong.
        size = ["resources.nodes=2", *(overrides or ())]
        job = read_job(None, size, options=read_options({}, ("true",))).spec
    findings = []
    for finding in _findings(run_root, job, wait_s=wait):
        findings.append(finding)
        if not as_json:
            echo(str(finding))
    has_error = any(finding.verdict == "error" for finding in findings)
    if as_json:
        echo(json.dumps({"ok": not has_error, "findings": [asdict(finding) for finding in findings]}, indent=2))
    raise typer.Exit(1 if has_error else 0)


def _findings(run_root: Path, job: JobSpec | None, *, wait_s: float) -> Iterator[Finding]:
    """Yield what is found on this machine, and on the nodes of a job.

    Args:
        job: the job; None examines this machine alone.
        wait_s: how long the job may wait for its nodes, in seconds.
    """
    from hpcddp.doctor.install import examine_machine, examine_nodes

    for finding in examine_machine(run_root, os.environ):
        warns_of_run_root = finding.name == "run root" and finding.verdict == "warning"
        # The job shows whether the nodes see the run root, so nothing has to be warned of.
        if job is None or not warns_of_run_root:
            yield finding
    if job is not None:
        python = job.environment.interpreter or sys.executable
        yield from examine_nodes(job, run_root, python=python, environment=os.environ, wait_s=wait_s)
