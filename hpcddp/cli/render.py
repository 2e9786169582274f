"""The command ``hpcddp render``."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcddp.api import request_to_submit
from hpcddp.cli.command_words import JobCommand, job_arguments
from hpcddp.cli.options import (
    AsJson,
    JobFileOrNone,
    MaxParallel,
    Overrides,
    SweepFile,
    SweepOptions,
    read_sweep_options,
)
from hpcddp.cli.output import echo, warn
from hpcddp.errors import UserError

if TYPE_CHECKING:
    from hpcddp.submission.request import SubmitRequest


class OutputFileError(UserError):
    """An output file that cannot be written."""

    kind = "output_file"


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(cls=JobCommand)(render)


def render(
    context: typer.Context,
    job_file: JobFileOrNone = None,
    *,
    overrides: Overrides = None,
    run_id: Annotated[
        str | None, typer.Option("--run-id", metavar="ID", help="Render the script of this run, as submit would.")
    ] = None,
    axes: SweepOptions = None,
    sweep_file: SweepFile = None,
    max_parallel: MaxParallel = None,
    template: Annotated[
        str | None, typer.Option(metavar="NAME|PATH", help="Template of the script: docs/templates.md.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the script to a file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the sbatch script of a job.

    The command submits nothing, and needs neither Slurm nor torch. Without --run-id, you submit the script with sbatch
    yourself: its output goes to the directory in which you submit, and its run id contains the job id.

    A job that submit would refuse on every machine is refused. What only this machine lacks is not looked for.

    Example: hpcddp render job.yaml -o job.sh && sbatch job.sh

    Example: hpcddp render --nodes 2 --gpus-per-node 4 --cpus-per-task 8 -- python train.py
    """
    from hpcddp.submission.checks import check_renderable
    from hpcddp.submission.render import notes_about_script, render_script
    from hpcddp.submission.template import find_template

    arguments = job_arguments(context)
    sweep = read_sweep_options(axes, sweep_file, max_parallel)
    job = arguments.load(job_file, overrides=overrides, sweep=sweep)
    request = request_to_submit(job, run_id=run_id, template=template, environment=os.environ)
    check_renderable(request)
    script = render_script(request)
    _warn_of_interpreter(request)
    for note in notes_about_script(request, script):
        warn(note)
    if output is not None:
        _write(output, script.text, job_file=job_file, template=find_template(template))
    if as_json:
        from hpcddp.submission.render import describe

        echo(json.dumps(describe(request, script), indent=2))
    elif output is None:
        # Bytes, so that the output does not depend on the terminal's encoding.
        typer.echo(script.text.encode(), nl=False)


def _warn_of_interpreter(request: SubmitRequest) -> None:
    """Warn on a machine without Slurm, such as a laptop, about a script that calls this machine's own interpreter."""
    environment = request.job.spec.environment
    is_named = environment.interpreter is not None or environment.conda is not None
    if not is_named and shutil.which("sbatch", path=request.environment.get("PATH")) is None:
        warn(
            f"the script calls {request.python}, the interpreter of this machine, which has no Slurm; if the cluster "
            "does not have it, name one that the cluster has, with hpcddp: --set environment.python=PATH"
        )


def _write(path: Path, text: str, *, job_file: Path | None, template: Path) -> None:
    """Write the whole script, or nothing.

    Args:
        job_file: the file of the job; None for a command.
        template: the file of the template.

    Raises:
        OutputFileError: the file cannot be written, is not a regular file, or is one that the script is made from.
    """
    from hpcddp.run.files import write_through_link

    sources = {"the template": template}
    if job_file is not None:
        sources["the job file"] = job_file
    try:
        if path.is_dir():
            raise OutputFileError(f"-o is {str(path)!r}, which is a directory; write the name of a file in it")
        if path.exists() and not path.is_file():
            raise OutputFileError(f"-o is {str(path)!r}, which is not a regular file; leave -o out to print the script")
        if not path.parent.is_dir():
            raise OutputFileError(
                f"-o is {str(path)!r}, and the directory {str(path.parent)!r} does not exist; make it first"
            )
        for name, source in sources.items():
            if path.exists() and path.samefile(source):
                raise OutputFileError(f"-o is {str(path)!r}, which is {name}; write another name")
        write_through_link(path, text)
    except OSError as error:
        raise OutputFileError(
            f"-o is {str(path)!r}, which cannot be written ({error.strerror}); write another name"
        ) from None
