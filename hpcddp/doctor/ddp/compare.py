"""``hpcddp doctor ddp``: compare one process with W ranks on the user's model, data and loss."""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from hpcddp.batch.refusals import PlanError
from hpcddp.doctor.ddp.job import Comparison, ProcessSettings, Report, comparison_of, run_ranks
from hpcddp.doctor.errors import ComparisonError, percent
from hpcddp.errors import counted
from hpcddp.jobfile.job import JobSpec

# Kinds of errors that a model may raise in double precision although it works in single precision.
_MODEL_ERRORS: Final = ("user_code", "model", "unexpected")
# Relative errors of a gradient that may be rounding: of one single-precision layer in a double-precision model, too.
_TOLERANCES: Final = {"fp64": 1e-5, "fp32": 1e-4}


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpFinding:
    """One finding of a comparison.

    Args:
        kind: a stable identifier for programs.
        severity: ``defect``: W ranks train differently from one process; ``note``: information.
        way_out: where to look, or what to do.
    """

    kind: str
    severity: Literal["defect", "note"]
    sentence: str
    way_out: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpDiagnosis:
    """Result of ``hpcddp doctor ddp``.

    Args:
        steps: number of compared optimizer steps.
        gradient_error: the largest relative error of a parameter's gradient; None if no step was made.
    """

    comparison: Comparison
    steps: int
    gradient_error: float | None
    findings: tuple[DdpFinding, ...]

    @property
    def defect(self) -> bool:
        """Whether W ranks train differently from one process."""
        return any(finding.severity == "defect" for finding in self.findings)

    @property
    def verdict(self) -> str:
        """The verdict in capitals."""
        return "DEFECT" if self.defect else "THE SAME"

    def as_json(self) -> dict[str, Any]:
        """Return the diagnosis as a JSON document."""
        error = self.gradient_error
        return {
            "job": self.comparison.job.name,
            "verdict": self.verdict,
            "defect": self.defect,
            "world_size": self.comparison.world_size,
            "global_batch_size": self.comparison.global_batch_size,
            "grad_accum_steps": self.comparison.grad_accum_steps,
            "precision": self.comparison.precision,
            "steps": self.steps,
            "gradient_error": error if error is not None and math.isfinite(error) else None,
            "findings": [asdict(finding) for finding in self.findings],
        }

    def explain(self) -> str:
        """Return the diagnosis as text, ending with a newline."""
        comparison = self.comparison
        micro_steps = "" if comparison.grad_accum_steps == 1 else f", {comparison.grad_accum_steps} micro-steps each"
        steps = counted(self.steps, "step") if self.steps else "no step"
        size = f"{comparison.global_batch_size} samples in {comparison.precision}, on CPUs"
        lines = [
            f"{comparison.job.name}: {self.verdict}",
            f"one process against {comparison.world_size} ranks{micro_steps}: {steps} of {size}",
        ]
        if self.gradient_error is not None:
            lines.append(f"largest relative error of a parameter's gradient: {percent(self.gradient_error)}")
        for finding in self.findings:
            lines += ["", f"{finding.severity}: {finding.sentence}", f"    {finding.way_out}"]
        return "\n".join(lines) + "\n"


def examine_job(
    job: JobSpec,
    *,
    world_size: int | None,
    steps: int,
    directory: Path,
    environment: Mapping[str, str],
    timeout_s: float,
) -> DdpDiagnosis:
    """Train a few steps in one process and on W ranks, on this machine's CPUs, and report the first difference.

    Args:
        world_size: W; None = the job's world size, at least 2 and at most 4.
        steps: K >= 1, optimizer steps to compare.
        directory: working directory, from which the user's modules are imported.
        environment: variables of this process; the job's own variables override them.
        timeout_s: timeout in seconds, for the one process and again for the ranks.

    Raises:
        ComparisonError: the job does not run in one process, took too long, or draws random numbers beside dropout.
    """
    comparison = comparison_of(job, world_size=world_size)
    variables = {"GLOO_SOCKET_IFNAME": "lo", **environment, **job.environment.env, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="hpcddp-doctor-") as scratch:
        settings = ProcessSettings(
            python=job.environment.interpreter or sys.executable,
            directory=directory,
            environment=variables,
            scratch=Path(scratch),
            steps=steps,
            timeout_s=timeout_s,
        )
        comparison, alone = _run_alone(comparison, settings)
        ranks = run_ranks(settings, "ranks", comparison.document(ranks=comparison.world_size), comparison.world_size)
    errors = [report["error"] for report in ranks if report["error"] is not None]
    refused = [error["message"] for error in errors if error["kind"] == PlanError.kind]
    if refused:
        raise ComparisonError(f"the job does not run on {comparison.world_size} ranks: {refused[0]}")
    if errors:
        findings = (failure(errors, comparison),)
        return DdpDiagnosis(comparison=comparison, steps=0, gradient_error=None, findings=findings)
    return _compare(alone, ranks, comparison)


def _run_alone(comparison: Comparison, settings: ProcessSettings) -> tuple[Comparison, Report]:
    """Return the comparison in a precision that the model supports, and the report of one process.

    Raises:
        ComparisonError: the process failed, or its loss or gradients cannot be compared.
    """
    (alone,) = run_ranks(settings, "alone", comparison.document(ranks=1), 1)
    if alone["error"] is not None and alone["error"]["kind"] in _MODEL_ERRORS:
        single = replace(comparison, precision="fp32")
        (again,) = run_ranks(settings, "alone-fp32", single.document(ranks=1), 1)
        if again["error"] is None:
            comparison = single
            alone = again
    if alone["error"] is not None:
        raise ComparisonError(f"the job does not run in one process: {alone['error']['message']}")
    loss = alone["steps"][0]["loss"]
    if not math.isfinite(loss):
        raise ComparisonError(
            f"the loss of the first step is {loss} in one process, and nothing can be compared with that; see that the "
            "model gives finite numbers"
        )
    if not any(step["has_gradient"] for step in alone["steps"]):
        raise ComparisonError(
            "the gradient of every parameter is 0 in one process, in every step, and nothing can be compared with "
            "that; see that the loss depends on the outputs of the model, and the outputs on its parameters"
        )
    if alone["draws_random_numbers"]:
        raise ComparisonError(
            "the model draws random numbers other than dropout, and gradients differ because of them; run the "
            "comparison with these random numbers switched off"
        )
    return comparison, alone


def failure(errors: Sequence[Mapping[str, Any]], comparison: Comparison) -> DdpFinding:
    """Return the finding about ranks that failed although one process did not."""
    first = min(errors, key=lambda error: float(error["time"]))
    return DdpFinding(
        kind="fails_on_ranks",
        severity="defect",
        sentence=f"One process trains, and {comparison.world_size} ranks do not: {first['message']}.",
        way_out="See where the model or the data use the rank or the number of ranks.",
    )


def _compare(alone: Report, ranks: Sequence[Report], comparison: Comparison) -> DdpDiagnosis:
    steps_of_ranks = list(zip(*(report["steps"] for report in ranks), strict=False))
    errors = [error for step in steps_of_ranks for error in step[0]["gradient_errors"].values()]
    defect = _different_start(alone, ranks[0], comparison)
    for number, (right, steps) in enumerate(zip(alone["steps"], steps_of_ranks, strict=False), 1):
        defect = defect or _different_step(number, right, steps, comparison)
    findings = [] if defect is None else [defect]
    if alone["batch_norms"]:
        findings.append(
            DdpFinding(
                kind="batch_norm",
                severity="note",
                sentence=f"The statistics of BatchNorm ({counted(alone['batch_norms'], 'layer')}) were fixed for the "
                "comparison; in a training each rank takes them over its own micro-batches.",
                way_out="For statistics over all ranks: train.batch_norm: sync.",
            )
        )
    return DdpDiagnosis(
        comparison=comparison,
        steps=len(steps_of_ranks),
        gradient_error=max(errors, default=None),
        findings=tuple(findings),
    )


def _different_start(alone: Report, first_rank: Report, comparison: Comparison) -> DdpFinding | None:
    name = _first_difference(alone["initial"], first_rank["initial"])
    if name is None:
        return None
    return DdpFinding(
        kind="initial_values",
        severity="defect",
        sentence=f"The initial value of {name} differs between {comparison.world_size} ranks and one process.",
        way_out="Initialise parameters with torch's generator only, which is seeded, and without the rank.",
    )


def _different_step(
    number: int, right: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], comparison: Comparison
) -> DdpFinding | None:
    """Return the first of what differs in a step: the samples, a parameter on another rank, a gradient.

    Args:
        number: of the step, from 1 on.
        right: the step of the one process.
        steps: the step of each rank.
    """
    samples = [sample for step in steps for sample in step["samples"]]
    different = sum(sample != other for sample, other in zip(right["samples"], samples, strict=False))
    different += abs(len(samples) - len(right["samples"]))
    if different:
        return DdpFinding(
            kind="samples",
            severity="defect",
            sentence=f"{different} of {len(right['samples'])} samples of step {number} are not those of one process: "
            "the data set returns other samples on other ranks.",
            way_out="A sample must depend on its index only: do not shuffle, shard or draw by rank in a data set.",
        )
    for rank, step in enumerate(steps):
        name = _first_difference(steps[0]["parameters"], step["parameters"])
        if name is not None:
            return DdpFinding(
                kind="drift",
                severity="defect",
                sentence=f"After step {number} parameter {name} on rank {rank} is not that of rank 0: the replicas "
                "diverge.",
                way_out="Only the optimizer may change parameters, and nothing in it may depend on the rank.",
            )
    tolerance = _TOLERANCES[comparison.precision]
    wrong = {name: error for name, error in steps[0]["gradient_errors"].items() if not error <= tolerance}
    if wrong:
        return _wrong_gradient(number, wrong, comparison)
    return None


def _wrong_gradient(number: int, wrong: Mapping[str, float], comparison: Comparison) -> DdpFinding:
    worst = max(wrong, key=wrong.__getitem__)
    others = f" and {counted(len(wrong) - 1, 'more parameter')}" if len(wrong) > 1 else ""
    train = comparison.job.train
    where = "the model"
    if train is not None and train.loss is not None:
        where = f"the loss {train.loss} (hpcddp doctor loss {train.loss}), then in the model,"
    return DdpFinding(
        kind="gradient",
        severity="defect",
        sentence=f"The gradient of {worst}{others} is off by {percent(wrong[worst])} in step {number}.",
        way_out=f"Look in {where} for what depends on the rank, the number of ranks, the samples of other ranks or the "
        "size of a micro-batch.",
    )


def _first_difference(first: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """Return the first name whose value is another one in ``other``."""
    return next((name for name, value in first.items() if other.get(name) != value), None)
