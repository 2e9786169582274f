"""``hpcddp doctor ddp``: compare one process with W ranks on the user's model, data and loss."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from hpcddp.batch.plan import PlanError, plan_batch
from hpcddp.doctor.errors import ComparisonError, percent
from hpcddp.errors import counted
from hpcddp.jobfile.field_facts import AS_IN_JOB, facts_of
from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.resources import Resources
from hpcddp.jobfile.sections import Train
from hpcddp.jobfile.write import dump_job
from hpcddp.run.files import TAIL_BYTES, read_tail
from hpcddp.run.metrics import finite_number
from hpcddp.slurm.rank_env import RankEnv

Precision = Literal["fp64", "fp32"]

# A larger batch takes longer and shows the same errors.
_MOST_IN_A_BATCH: Final = 32
_MOST_RANKS: Final = 4
_LEAST_RANKS: Final = 2
_MICRO_STEPS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The compared job and its sizes.

    Args:
        world_size: W >= 2, ranks that are compared with one process.
        global_batch_size: B, samples (or groups) of a step.
        grad_accum_steps: A, micro-steps of each rank; the one process makes one micro-step.
    """

    job: JobSpec
    world_size: int
    global_batch_size: int
    grad_accum_steps: int
    precision: Precision = "fp64"

    def document(self, *, ranks: int) -> str:
        """Return the resolved job of ``ranks`` processes, 1 or W.

        Settings that hide a wrong gradient (clipping, rounding) or are not compared (averages, guards) are off.
        """
        job = self.job
        train = None if job.train is None else _comparable(job.train, self.precision)
        batch = job.batch.model_copy(
            update={
                "global_batch_size": self.global_batch_size,
                "max_per_device_batch_size": None,
                "per_device_batch_size": None,
                "grad_accum_steps": 1 if ranks == 1 else self.grad_accum_steps,
                "split": "exact",
                # All batches have the same size, so the smallest share is known.
                "tail": "wrap",
            }
        )
        plain = job.model_copy(
            update={
                "resources": Resources(nodes=1, tasks_per_node=ranks, cpus_per_task=1),
                "batch": batch,
                "train": train,
            }
        )
        return dump_job(plain, environment_values=False)


def _comparable(train: Train, precision: Precision) -> Train:
    values = {name: facts_of(field).ddp_value for name, field in Train.model_fields.items()}
    changed = {name: value for name, value in values.items() if value is not AS_IN_JOB}
    return train.model_copy(update={**changed, "precision": precision})


def comparison_of(job: JobSpec, *, world_size: int | None) -> Comparison:
    """Return the comparison for a job.

    Args:
        world_size: W; None = the job's world size, at least 2 and at most 4.

    Raises:
        ComparisonError: the job has no model, or W or the batch is too small.
    """
    if job.train is None:
        raise ComparisonError("the job has no train section, so that there is no model to look at; write one")
    if world_size is not None and world_size < _LEAST_RANKS:
        raise ComparisonError(
            f"--world-size is {world_size}, and one process is what the ranks are compared with; write 2 or more"
        )
    ranks = world_size or min(max(job.world_size, _LEAST_RANKS), _MOST_RANKS)
    batch = min(job.global_batch_size, max(_MOST_IN_A_BATCH, _LEAST_RANKS * ranks))
    if batch < _LEAST_RANKS * ranks:
        raise ComparisonError(
            f"batch.global_batch_size is {batch}, which leaves {ranks} ranks fewer than two samples each; "
            f"write {_LEAST_RANKS * ranks} or more, or a smaller --world-size"
        )
    grad_accum_steps = 1
    is_large_enough = batch >= _LEAST_RANKS * _MICRO_STEPS * ranks
    if job.train.batch_norm == "local" and is_large_enough and _accumulates(job):
        grad_accum_steps = _MICRO_STEPS
    return Comparison(job=job, world_size=ranks, global_batch_size=batch, grad_accum_steps=grad_accum_steps)


def _accumulates(job: JobSpec) -> bool:
    plan = plan_batch(
        global_batch_size=job.global_batch_size,
        world_size=job.world_size,
        samples=None,
        max_per_device_batch_size=job.batch.max_per_device_batch_size,
        grad_accum_steps=job.batch.grad_accum_steps,
        per_device_batch_size=job.batch.per_device_batch_size,
    )
    return plan.grad_accum_steps > 1


Report = Mapping[str, Any]

_POLL_S: Final = 0.05
# How long other ranks may run after one has failed; one of them may still report the cause.
_GRACE_S: Final = 5.0
_HOST: Final = "localhost"
_PORT: Final = 29_500  # torchrun's; the ranks meet at a file


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """Settings of the processes of a comparison.

    Args:
        directory: the working directory, and the first entry of ``sys.path``.
        scratch: a directory for this comparison only.
        steps: K, optimizer steps to make.
        timeout_s: timeout for a group of ranks, in seconds.
    """

    python: str
    directory: Path
    environment: Mapping[str, str]
    scratch: Path
    steps: int
    timeout_s: float


def run_ranks(settings: ProcessSettings, name: str, document: str, world_size: int) -> list[Report]:
    """Run ``world_size`` ranks to their end and return their reports; a failed rank reports its ``error``.

    Raises:
        ComparisonError: the ranks took too long, or cannot be started.
    """
    folder = settings.scratch / name
    folder.mkdir()
    (folder / "job.yaml").write_text(document, encoding="utf-8")
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with contextlib.ExitStack() as started:
            for rank in range(world_size):
                process = _start(settings, folder, one_node(rank, world_size))
                started.callback(_end, process)
                processes.append(process)
            in_time = _wait(processes, settings.timeout_s)
    except OSError as error:
        raise ComparisonError(f"the interpreter {settings.python} cannot be started ({error})") from error
    if not in_time:
        slow = "one process" if world_size == 1 else f"{world_size} ranks"
        raise ComparisonError(
            f"{slow} took longer than {settings.timeout_s:g} s; raise --timeout, or see whether ranks wait for each "
            "other in collectives of the model's own that not all of them enter"
        )
    return [_report(folder, rank, process.returncode) for rank, process in enumerate(processes)]


def one_node(rank: int, world_size: int) -> RankEnv:
    """Return what a rank finds in its environment: it is a task of a Slurm job on one node."""
    return RankEnv(
        rank=rank,
        local_rank=rank,
        world_size=world_size,
        local_world_size=world_size,
        node_rank=0,
        nodes=1,
        hosts=(_HOST,),
        tasks_per_node=(world_size,),
        job_id="1",
        source="slurm",
    )


def _start(settings: ProcessSettings, folder: Path, env: RankEnv) -> subprocess.Popen[bytes]:
    command = [settings.python, "-P", "-m", "hpcddp.doctor.ddp.rank", str(folder), str(settings.steps)]
    command += [str(settings.directory), str(settings.timeout_s)]
    # A model or a data set may read its rank from the environment, as in a training.
    variables = {**settings.environment, **env.slurm_exports(), **env.exports(_HOST, _PORT)}
    with (folder / f"rank-{env.rank}.log").open("wb") as log:
        # In a new session, so that processes of the user's code are killed with it.
        return subprocess.Popen(
            command,
            cwd=settings.directory,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> bool:
    """Wait for all ranks, or until shortly after the first failure; return False after a timeout."""
    deadline = time.monotonic() + timeout_s
    failed = False
    while any(process.poll() is None for process in processes):
        if not failed and any(process.poll() for process in processes):
            failed = True
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        if time.monotonic() > deadline:
            return failed
        time.sleep(_POLL_S)
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _report(folder: Path, rank: int, code: int) -> Report:
    path = folder / f"rank-{rank}.json"
    if path.exists():
        return dict(json.loads(path.read_text(encoding="utf-8")))
    lines = read_tail(folder / f"rank-{rank}.log", TAIL_BYTES).strip().splitlines()
    output = lines[-1] if lines else "it printed nothing"
    message = f"rank {rank} ended with code {code} before it could report ({output})"
    # The infinite time puts ranks that were killed because of another rank last.
    return {"error": {"kind": "ended", "message": message, "time": float("inf")}}


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
    sentence: str
    way_out: str
    severity: Literal["defect", "note"] = "defect"


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
        return {
            "job": self.comparison.job.name,
            "verdict": self.verdict,
            "defect": self.defect,
            "world_size": self.comparison.world_size,
            "global_batch_size": self.comparison.global_batch_size,
            "grad_accum_steps": self.comparison.grad_accum_steps,
            "precision": self.comparison.precision,
            "steps": self.steps,
            "gradient_error": finite_number(self.gradient_error),
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
    with tempfile.TemporaryDirectory(prefix="hpcddp-doctor-") as scratch:
        settings = ProcessSettings(
            python=job.environment.interpreter or sys.executable,
            directory=directory,
            environment={"GLOO_SOCKET_IFNAME": "lo", **environment, **job.environment.env, "OMP_NUM_THREADS": "1"},
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
        sentence=f"One process trains, and {comparison.world_size} ranks do not: {first['message']}.",
        way_out="See where the model or the data use the rank or the number of ranks.",
    )


def _compare(alone: Report, ranks: Sequence[Report], comparison: Comparison) -> DdpDiagnosis:
    steps_of_ranks = list(zip(*(report["steps"] for report in ranks), strict=False))
    errors = [error for step in steps_of_ranks for error in step[0]["gradient_errors"].values()]
    defect = None
    name = _first_difference(alone["initial"], ranks[0]["initial"])
    if name is not None:
        defect = DdpFinding(
            kind="initial_values",
            sentence=f"The initial value of {name} differs between {comparison.world_size} ranks and one process.",
            way_out="Initialise parameters with torch's generator only, which is seeded, and without the rank.",
        )
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
            sentence=f"{different} of {len(right['samples'])} samples of step {number} are not those of one process: "
            "the data set returns other samples on other ranks.",
            way_out="A sample must depend on its index only: do not shuffle, shard or draw by rank in a data set.",
        )
    for rank, step in enumerate(steps):
        name = _first_difference(steps[0]["parameters"], step["parameters"])
        if name is not None:
            return DdpFinding(
                kind="drift",
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
        sentence=f"The gradient of {worst}{others} is off by {percent(wrong[worst])} in step {number}.",
        way_out=f"Look in {where} for what depends on the rank, the number of ranks, the samples of other ranks or the "
        "size of a micro-batch.",
    )


def _first_difference(first: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """Return the first name whose value is another one in ``other``."""
    return next((name for name, value in first.items() if other.get(name) != value), None)
