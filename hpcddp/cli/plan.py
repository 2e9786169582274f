"""``hpcddp plan``: the plan of a job file, of a command, or of plain numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcddp.api import plans_of, read_job
from hpcddp.cli.options import AsJson, Overrides
from hpcddp.cli.output import echo
from hpcddp.errors import UserError

if TYPE_CHECKING:
    from hpcddp.batch.job import JobPlan
    from hpcddp.batch.scaling import Scaling


class TailChoice(StrEnum):
    """Treatments of an epoch's last batch."""

    KEEP = "keep"
    DROP = "drop"
    WRAP = "wrap"


class SplitChoice(StrEnum):
    """Treatments of a batch that the ranks do not divide."""

    EXACT = "exact"
    ERROR = "error"


class RuleChoice(StrEnum):
    """Rules that scale the learning rate with the global batch."""

    NONE = "none"
    LINEAR = "linear"
    SQRT = "sqrt"


class OptimizerChoice(StrEnum):
    """The optimizers of the job file."""

    SGD = "sgd"
    ADAMW = "adamw"


_NUMBERS = "Numbers in place of a job file"


def _number(metavar: str, text: str) -> Any:  # noqa: ANN401  as typer.Option returns it
    return typer.Option(metavar=metavar, help=text, rich_help_panel=_NUMBERS)


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(plan)


def plan(  # noqa: PLR0913  each is an option
    job_file: Annotated[Path | None, typer.Argument(metavar="JOB", help="The job file (YAML).")] = None,
    *,
    overrides: Overrides = None,
    samples: Annotated[
        int | None, typer.Option(metavar="N", help="Samples of the training data; by default they are counted.")
    ] = None,
    global_batch: Annotated[int | None, _number("B", "Samples per optimizer step, over all ranks.")] = None,
    world_size: Annotated[int | None, _number("W", "Ranks.")] = None,
    max_per_device: Annotated[int | None, _number("M", "The most samples in one micro-batch.")] = None,
    grad_accum: Annotated[
        int | None, _number("A", "Micro-steps per optimizer step; by default as few as M allows.")
    ] = None,
    per_device: Annotated[int | None, _number("n", "Samples in every micro-batch; A follows.")] = None,
    tail: Annotated[
        TailChoice | None, _number("keep|drop|wrap", "The last batch of an epoch; by default keep.")
    ] = None,
    split: Annotated[
        SplitChoice | None, _number("exact|error", "What to do if W does not divide the batch; by default exact.")
    ] = None,
    epochs: Annotated[int | None, _number("E", "Passes over the data.")] = None,
    base_lr: Annotated[float | None, _number("RATE", "Learning rate after the warm-up.")] = None,
    base_batch: Annotated[int | None, _number("B0", "The global batch that RATE was tuned for.")] = None,
    rule: Annotated[
        RuleChoice | None, _number("none|linear|sqrt", "How RATE scales with B / B0; by default none.")
    ] = None,
    optimizer: Annotated[OptimizerChoice | None, _number("sgd|adamw", "The optimizer; by default sgd.")] = None,
    as_json: AsJson = False,
) -> None:
    """Explain the batch and the learning rate of a job.

    For a job file, or for a global batch and a world size, it prints the samples of each rank, the steps of an epoch,
    the learning rate, and the reasons.

    Example: hpcddp plan jobs/resnet50_imagenet.yaml --set resources.nodes=4

    Example: hpcddp plan --global-batch 256 --world-size 3 --max-per-device 32
    """
    numbers = {
        "--global-batch": global_batch,
        "--world-size": world_size,
        "--max-per-device": max_per_device,
        "--grad-accum": grad_accum,
        "--per-device": per_device,
        "--tail": tail,
        "--split": split,
        "--epochs": epochs,
        "--base-lr": base_lr,
        "--base-batch": base_batch,
        "--rule": rule,
        "--optimizer": optimizer,
    }
    given: dict[str, Any] = {option: value for option, value in numbers.items() if value is not None}
    if job_file is not None:
        document, text = _plan_job(job_file, overrides, samples, given)
    else:
        document, text = _answer(_plan_numbers(given, overrides, samples))
    if as_json:
        echo(json.dumps(document, indent=2))
    else:
        echo(text, nl=False)


_Answer = tuple[dict[str, Any], str]
"""The document of ``--json``, and the text."""


def _plan_job(
    job_file: Path,
    overrides: Sequence[str] | None,
    samples: int | None,
    given: Mapping[str, Any],
) -> _Answer:
    if given:
        raise UserError(
            f"{', '.join(given)} cannot be given together with the job file {job_file}, which states the same; "
            "leave the job file out, or change it with --set"
        )
    from hpcddp.batch.explain import explain_range

    spec = read_job(job_file, overrides).spec
    plans = plans_of(spec, samples)
    document, text = _answer(plans[spec.nodes])
    if len(plans) == 1:
        return document, text
    document["by_nodes"] = {str(nodes): plan.as_json() for nodes, plan in plans.items()}
    return document, f"{explain_range(plans)}\n{text}"


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
    scaling = _scaling(given)
    batch = plan_batch(
        global_batch_size=given["--global-batch"],
        world_size=given["--world-size"],
        samples=samples,
        max_per_device_batch_size=given.get("--max-per-device"),
        grad_accum_steps=given.get("--grad-accum"),
        per_device_batch_size=given.get("--per-device"),
        tail=given.get("--tail", TailChoice.KEEP).value,
        split=given.get("--split", SplitChoice.EXACT).value,
    )
    rate = None if scaling is None else scaling.scaled.learning_rate
    return plan_numbers(batch, epochs=given.get("--epochs"), learning_rate=rate, scaling=scaling)


def _scaling(given: Mapping[str, Any]) -> Scaling | None:
    """Return the scaled ``--base-lr``; None where no rate is given."""
    from hpcddp.batch.plan import refuse_below_one
    from hpcddp.batch.scaling import scaling_of
    from hpcddp.jobfile.sections import LearningRate, Optimizer

    rate = given.get("--base-lr")
    if rate is None:
        without_use = [option for option in ("--base-batch", "--rule", "--optimizer") if option in given]
        if without_use:
            raise UserError(
                f"{', '.join(without_use)} says how a rate is scaled, and none is given; add --base-lr, or drop it"
            )
        return None
    if not (math.isfinite(rate) and rate > 0):
        raise UserError(f"--base-lr is {rate:g}, and a learning rate is above 0; write for example 0.1")
    global_batch = given["--global-batch"]
    base_batch = given.get("--base-batch")
    refuse_below_one(global_batch_size=global_batch, base_global_batch_size=base_batch)
    rule = given.get("--rule", RuleChoice.NONE)
    # Without a job file the numbers are not limited by its types.
    learning_rate = LearningRate.model_construct(base=rate, base_global_batch_size=base_batch, rule=rule.value)
    optimizer = Optimizer(name=given.get("--optimizer", OptimizerChoice.SGD).value)
    return scaling_of(learning_rate, optimizer, ema_decay=None, global_batch_size=global_batch)


def _answer(result: JobPlan) -> _Answer:
    from hpcddp.batch.explain import explain

    return result.as_json(), explain(result)
