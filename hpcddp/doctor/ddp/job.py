"""The compared job: a small copy of the user's job in double precision on CPUs, and the processes that run it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from hpcddp.batch.plan import plan_batch
from hpcddp.doctor.errors import ComparisonError
from hpcddp.jobfile.field_facts import AS_IN_JOB, facts_of
from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.resources import Resources
from hpcddp.jobfile.sections import Train
from hpcddp.jobfile.write import dump_job
from hpcddp.run.files import TAIL_BYTES, read_tail
from hpcddp.slurm.rank_env import RankEnv

Precision = Literal["fp64", "fp32"]

# A larger batch takes longer and shows the same errors.
MOST_IN_A_BATCH: Final = 32
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
    batch = min(job.global_batch_size, max(MOST_IN_A_BATCH, _LEAST_RANKS * ranks))
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
        report: Report = json.loads(path.read_text(encoding="utf-8"))
        return report
    lines = read_tail(folder / f"rank-{rank}.log", TAIL_BYTES).strip().splitlines()
    output = lines[-1] if lines else "it printed nothing"
    message = f"rank {rank} ended with code {code} before it could report ({output})"
    # The infinite time puts ranks that were killed because of another rank last.
    return {"error": {"kind": "ended", "message": message, "time": float("inf")}}
