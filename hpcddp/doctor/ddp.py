"""``hpcddp doctor ddp``: one process against W ranks on the user's model, data and loss."""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpcddp.batch.plan import PlanError
from hpcddp.doctor.ddp_errors import ComparisonError
from hpcddp.doctor.ddp_finding import DdpFinding
from hpcddp.doctor.ddp_findings import failure, judge
from hpcddp.doctor.ddp_gradients import worst_error
from hpcddp.doctor.ddp_job import Comparison, comparison_of
from hpcddp.doctor.ddp_processes import Place, Report, run_ranks
from hpcddp.spec.job import JobSpec

# What a model that is written for single precision raises in double precision.
_MODEL_ERRORS = ("user_code", "model", "unexpected")


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpDiagnosis:
    """What ``hpcddp doctor ddp`` says.

    Args:
        comparison: what was compared.
        steps: optimizer steps that were compared.
        gradient_error: the largest relative error of a parameter's gradient; None where no step was made.
        findings: what was found, defects first.
    """

    comparison: Comparison
    steps: int
    gradient_error: float | None
    findings: tuple[DdpFinding, ...]

    @property
    def defect(self) -> bool:
        """Whether W ranks train something else than one process."""
        return any(finding.severity == "defect" for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Return the diagnosis for a program."""
        error = self.gradient_error
        return {
            "job": self.comparison.job.name,
            "defect": self.defect,
            "world_size": self.comparison.world_size,
            "global_batch_size": self.comparison.global_batch_size,
            "grad_accum_steps": self.comparison.grad_accum_steps,
            "precision": self.comparison.precision,
            "steps": self.steps,
            "gradient_error": error if error is not None and math.isfinite(error) else None,
            "findings": [
                {name: getattr(finding, name) for name in ("kind", "severity", "sentence", "way_out")}
                for finding in self.findings
            ],
        }

    def explain(self) -> str:
        """Return the diagnosis for a person, ending with a newline."""
        compared = self.comparison
        accumulated = "" if compared.grad_accum_steps == 1 else f", {compared.grad_accum_steps} micro-steps each"
        steps = f"{self.steps} step{'s' if self.steps > 1 else ''}" if self.steps else "no step"
        size = f"{compared.global_batch_size} samples in {compared.precision}, on CPUs"
        lines = [
            f"{compared.job.name}: {'DEFECT' if self.defect else 'THE SAME'}",
            f"one process against {compared.world_size} ranks{accumulated}: {steps} of {size}",
        ]
        if self.gradient_error is not None:
            lines.append(f"largest relative error of a parameter's gradient: {self.gradient_error:.0e}")
        for finding in self.findings:
            lines += [
                "",
                f"{finding.severity}: {finding.sentence}",
                *([f"    {finding.way_out}"] * bool(finding.way_out)),
            ]
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
    """Train a few steps in one process and on W ranks, on this machine's CPUs, and say where they differ.

    Args:
        job: the resolved job.
        world_size: W; None = the job's own, 2 at least and 4 at most.
        steps: K >= 1, optimizer steps to compare.
        directory: where the user's modules and relative paths begin.
        environment: variables of this process, which the job's own go on top of.
        timeout_s: how long the one process, and then the ranks, may take, in seconds.

    Raises:
        ComparisonError: the job does not run in one process either, or took too long.
        PlanError: the batch cannot be split.
    """
    comparison = comparison_of(job, world_size=world_size)
    variables = {"GLOO_SOCKET_IFNAME": "lo", **environment, **job.environment.env, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="hpcddp-doctor-") as scratch:
        place = Place(
            python=job.environment.interpreter or sys.executable,
            directory=directory,
            environment=variables,
            scratch=Path(scratch),
            steps=steps,
            timeout_s=timeout_s,
        )
        comparison, alone = _run_alone(comparison, place)
        ranks = run_ranks(place, "ranks", comparison.document(ranks=comparison.world_size), comparison.world_size)
    return _diagnose(comparison, alone, ranks)


def _diagnose(comparison: Comparison, alone: Report, ranks: list[Report]) -> DdpDiagnosis:
    errors = [report["error"] for report in ranks if report["error"] is not None]
    refused = [error["message"] for error in errors if error["kind"] == PlanError.kind]
    if refused:
        raise ComparisonError(f"the job does not run on {comparison.world_size} ranks: {refused[0]}")
    if errors:
        found = (failure(errors, comparison),)
        return DdpDiagnosis(comparison=comparison, steps=0, gradient_error=None, findings=found)
    return DdpDiagnosis(
        comparison=comparison,
        steps=len(ranks[0]["looks"].get("exact", {}).get("steps", ())),
        gradient_error=worst_error(ranks),
        findings=tuple(judge(alone, ranks, comparison)),
    )


def _run_alone(comparison: Comparison, place: Place) -> tuple[Comparison, Report]:
    """Return what one process reports, and the comparison in the precision that the model takes.

    Raises:
        ComparisonError: it fails.
    """
    (alone,) = run_ranks(place, "alone", comparison.document(ranks=1), 1)
    if alone["error"] is not None and alone["error"]["kind"] in _MODEL_ERRORS:
        single = replace(comparison, precision="fp32")
        (again,) = run_ranks(place, "alone-fp32", single.document(ranks=1), 1)
        if again["error"] is None:
            comparison, alone = single, again
    if alone["error"] is not None:
        raise ComparisonError(f"the job does not run in one process: {alone['error']['message']}")
    first = alone["looks"]["exact"]["steps"][0]
    if not math.isfinite(first["loss"]):
        raise ComparisonError(
            f"the loss of the first step is {first['loss']} in one process, and nothing can be compared with that; see "
            "that the model gives finite numbers"
        )
    return comparison, alone
