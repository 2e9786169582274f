"""``hpcddp doctor``."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Annotated

import typer

from hpcddp.cli.doctor_ddp import ddp
from hpcddp.cli.options import AsJson

doctor = typer.Typer(
    name="doctor",
    help="""Find out what is not the same on N ranks, and repair it.

    Example: hpcddp doctor loss losses:dice_loss

    Example: hpcddp doctor ddp job.yaml
    """,
    rich_markup_mode=None,
    no_args_is_help=True,
)


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.add_typer(doctor)


doctor.command()(ddp)


@doctor.command()
def loss(
    name: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="loss(outputs, targets) -> scalar; a class or a function without parameters is called to make it.",
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
            help="Batches of your own: a function that returns (outputs, targets) or a list of such pairs, or a file "
            "that torch.save made of them. Everything that has one entry per sample is split.  [default: random ones]",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say whether a loss is the same on W ranks as on one.

    And how far off it is, and which helper repairs it. The loss is run in this process, on batches and on their parts:
    even, uneven, permuted. Values and gradients are compared in float64 with f(batch) = sum over shares of
    n_r/b * f(share). It takes seconds and no GPU.

    Exits 0 for MEAN; 1 for what plain DDP gets wrong: SUM (the gradient is W times too small), NOT DECOMPOSABLE,
    ORDER-DEPENDENT; 2 if the loss could not be run.

    Example: hpcddp doctor loss losses:dice_loss --world-size 8 --batch 256
    """
    # The loss is called hundreds of times: what it prints is no part of the answer.
    with contextlib.redirect_stdout(io.StringIO()):
        from hpcddp.doctor import explain
        from hpcddp.doctor.examination import examine

        found = examine(name, world_size=world_size, samples=batch, data=data, directory=Path.cwd())
    document = explain.as_json(found)
    typer.echo(json.dumps(document, indent=2) if as_json else explain.explain(found), nl=as_json)
    raise typer.Exit(1 if document["defect"] else 0)
