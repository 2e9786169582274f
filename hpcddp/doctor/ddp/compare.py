"""``hpcddp doctor ddp``: compare one process with W ranks on the user's model, data and loss."""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hpcddp.batch.refusals import PlanError
from hpcddp.doctor.ddp.findings import DdpFinding, failure, judge, worst_error
from hpcddp.doctor.ddp.job import Comparison, ProcessSettings, Report, comparison_of, run_ranks
from hpcddp.doctor.errors import ComparisonError
from hpcddp.errors import counted
from hpcddp.jobfile.job import JobSpec

# Kinds of errors that a model may raise in double precision although it works in single precision.
_MODEL_ERRORS = ("user_code", "model", "unexpected")


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
        if self.defect:
            return "DEFECT"
        if any(finding.severity == "hidden" for finding in self.findings):
            return "NOT COMPARED"
        return "THE SAME"

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
            lines.append(f"largest relative error of a parameter's gradient: {self.gradient_error:.0e}")
        for finding in self.findings:
            lines += ["", f"{finding.severity}: {finding.sentence}"]
            if finding.way_out:
                lines.append(f"    {finding.way_out}")
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
    """Train a few steps in one process and on W ranks, on this machine's CPUs, and report the differences.

    Args:
        world_size: W; None = the job's world size, at least 2 and at most 4.
        steps: K >= 1, optimizer steps to compare.
        directory: working directory, from which the user's modules are imported.
        environment: variables of this process; the job's own variables override them.
        timeout_s: timeout in seconds, for the one process and again for the ranks.

    Raises:
        ComparisonError: the job does not run in one process, or took too long.
        PlanError: the batch cannot be split.
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
            nodes=comparison.nodes,
        )
        comparison, alone = _run_alone(comparison, settings)
        ranks = run_ranks(settings, "ranks", comparison.document(ranks=comparison.world_size), comparison.world_size)
    return _diagnose(comparison, alone, ranks)


def _diagnose(comparison: Comparison, alone: Report, ranks: list[Report]) -> DdpDiagnosis:
    errors = [report["error"] for report in ranks if report["error"] is not None]
    refused = [error["message"] for error in errors if error["kind"] == PlanError.kind]
    if refused:
        raise ComparisonError(f"the job does not run on {comparison.world_size} ranks: {refused[0]}")
    if errors:
        findings = (failure(errors, comparison),)
        return DdpDiagnosis(comparison=comparison, steps=0, gradient_error=None, findings=findings)
    return DdpDiagnosis(
        comparison=comparison,
        steps=len(ranks[0]["observed"].get("fixed_statistics", {}).get("steps", ())),
        gradient_error=worst_error(ranks),
        findings=tuple(judge(alone, ranks, comparison)),
    )


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
    first = alone["observed"]["fixed_statistics"]["steps"][0]
    if not math.isfinite(first["loss"]):
        raise ComparisonError(
            f"the loss of the first step is {first['loss']} in one process, and nothing can be compared with that; see "
            "that the model gives finite numbers"
        )
    if not any(step["gradient_norm"] for step in alone["observed"]["fixed_statistics"]["steps"]):
        raise ComparisonError(
            "the gradient of every parameter is 0 in one process, in every step, and nothing can be compared with "
            "that; see that the loss depends on the outputs of the model, and the outputs on its parameters"
        )
    return comparison, alone
