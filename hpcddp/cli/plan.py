"""``hpcddp plan``."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcddp.cli.options import AsJson, Overrides, profiles_directory
from hpcddp.errors import UserError

if TYPE_CHECKING:
    from hpcddp.batch.job import JobPlan


class TailChoice(StrEnum):
    """What may become of an epoch's last batch."""

    KEEP = "keep"
    DROP = "drop"
    WRAP = "wrap"


class SplitChoice(StrEnum):
    """What may become of a batch that the ranks do not divide."""

    EXACT = "exact"
    ERROR = "error"


_NUMBERS = "Numbers in place of a job file"


def _number(metavar: str, text: str) -> Any:  # noqa: ANN401
    return typer.Option(metavar=metavar, help=text, rich_help_panel=_NUMBERS)


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(plan)


def plan(  # noqa: PLR0913
    job_file: Annotated[Path | None, typer.Argument(metavar="JOB", help="The job file (YAML).")] = None,
    *,
    overrides: Overrides = None,
    samples: Annotated[
        int | None, typer.Option(metavar="N", help="Samples of the training data; overrides what the data say.")
    ] = None,
    global_batch: Annotated[int | None, _number("B", "Samples per optimizer step, over all ranks.")] = None,
    world_size: Annotated[int | None, _number("W", "Ranks.")] = None,
    max_per_device: Annotated[int | None, _number("M", "The most samples in one micro-batch.")] = None,
    grad_accum: Annotated[int | None, _number("A", "Micro-steps per optimizer step; else what M needs.")] = None,
    tail: Annotated[TailChoice | None, _number("keep|drop|wrap", "An epoch's last batch; else keep.")] = None,
    split: Annotated[SplitChoice | None, _number("exact|error", "A batch that W does not divide; else exact.")] = None,
    epochs: Annotated[int | None, _number("E", "Passes over the data.")] = None,
    base_lr: Annotated[float | None, _number("RATE", "Learning rate after the warm-up.")] = None,
    as_json: AsJson = False,
) -> None:
    """Explain the batch: who gets how many samples, steps per epoch, learning rate, and why.

    Give a job file, or the global batch and the world size.

    Example: hpcddp plan --global-batch 256 --world-size 3 --max-per-device 32 --samples 1281167
    """
    numbers = {
        "--global-batch": global_batch,
        "--world-size": world_size,
        "--max-per-device": max_per_device,
        "--grad-accum": grad_accum,
        "--tail": tail,
        "--split": split,
        "--epochs": epochs,
        "--base-lr": base_lr,
    }
    given = {option: value for option, value in numbers.items() if value is not None}
    result = (
        _plan_numbers(given, overrides, samples) if job_file is None else _plan_job(job_file, overrides, samples, given)
    )
    _print(result, as_json=as_json)


def _plan_job(
    job_file: Path, overrides: Sequence[str] | None, samples: int | None, given: Mapping[str, Any]
) -> JobPlan:
    from hpcddp.batch.job import plan_job
    from hpcddp.batch.samples import count_samples
    from hpcddp.spec.read import load_job

    if given:
        raise UserError(
            f"{', '.join(given)} cannot be given together with the job file {job_file}, which states the same; "
            "leave the job file out, or change it with --set, for example --set batch.global_batch_size=256"
        )
    spec = load_job(job_file, overrides=overrides or (), profiles=profiles_directory(os.environ)).spec
    if samples is not None or spec.train is None:
        return plan_job(spec, samples=samples)
    python = spec.environment.python or sys.executable
    count = count_samples(spec.train, directory=Path.cwd(), python=python)
    return plan_job(spec, samples=count.samples, notes=() if count.note is None else (count.note,))


def _plan_numbers(given: Mapping[str, Any], overrides: Sequence[str] | None, samples: int | None) -> JobPlan:
    from hpcddp.batch.job import plan_numbers
    from hpcddp.batch.plan import plan_batch

    missing = [option for option in ("--global-batch", "--world-size") if option not in given]
    if missing:
        raise UserError(
            f"{' and '.join(missing)} must be given where there is no job file; "
            "write for example hpcddp plan --global-batch 256 --world-size 4, or hpcddp plan JOB"
        )
    if overrides:
        raise UserError(
            f"--set {overrides[0]} overrides a job file, and none is given; write hpcddp plan JOB --set ..."
        )
    rate = given.get("--base-lr")
    if rate is not None and not (math.isfinite(rate) and rate > 0):
        raise UserError(f"--base-lr is {rate:g}, and a learning rate is above 0; write for example 0.1")
    batch = plan_batch(
        global_batch_size=given["--global-batch"],
        world_size=given["--world-size"],
        samples=samples,
        max_per_device_batch_size=given.get("--max-per-device"),
        grad_accum_steps=given.get("--grad-accum"),
        tail=given.get("--tail", TailChoice.KEEP).value,
        split=given.get("--split", SplitChoice.EXACT).value,
    )
    return plan_numbers(batch, epochs=given.get("--epochs"), learning_rate=rate)


def _print(result: JobPlan, *, as_json: bool) -> None:
    from hpcddp.batch.explain import explain

    typer.echo(json.dumps(result.as_json(), indent=2) if as_json else explain(result), nl=as_json)
