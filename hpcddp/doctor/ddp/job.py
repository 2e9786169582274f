"""Reduce a job to a small one for the comparison, in double precision on CPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from hpcddp.batch.plan import plan_batch
from hpcddp.batch.split import ceil_div
from hpcddp.doctor.errors import ComparisonError
from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.resources import Resources
from hpcddp.jobfile.write import dump_job

Precision = Literal["fp64", "fp32"]

# A larger batch takes longer and shows the same errors.
MOST_IN_A_BATCH: Final = 32
_MOST_RANKS: Final = 4
_LEAST_RANKS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The compared job and its sizes.

    Args:
        job: the user's job.
        world_size: W >= 2, ranks that are compared with one process.
        global_batch_size: B, samples (or groups) of a step.
        grad_accum_steps: A, micro-steps of each rank; the one process makes one micro-step.
        precision: the precision of both.
    """

    job: JobSpec
    world_size: int
    global_batch_size: int
    grad_accum_steps: int
    precision: Precision = "fp64"

    @property
    def nodes(self) -> int:
        """Number of nodes of the W ranks: at most those of the job, with two ranks per node if the job has them."""
        nodes = self.job.resources.nodes
        return min(nodes, ceil_div(self.world_size, min(self.job.tasks_per_node, _LEAST_RANKS)))

    def document(self, *, ranks: int) -> str:
        """Return the resolved job of ``ranks`` processes, 1 or W.

        Settings that hide a wrong gradient (clipping, rounding) or are not compared (averages, guards) are off.
        """
        job, alone = self.job, ranks == 1
        train = None if job.train is None else job.train.model_copy(update={**_PLAIN, "precision": self.precision})
        batch = job.batch.model_copy(
            update={
                "global_batch_size": self.global_batch_size,
                "max_per_device_batch_size": None,
                "per_device_batch_size": None,
                "grad_accum_steps": 1 if alone else self.grad_accum_steps,
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


_PLAIN: Final = {
    "device": "cpu",
    "compile": False,
    "channels_last": False,
    "clip_grad_norm": None,
    "ema_decay": None,
    "num_workers": 0,
    "nonfinite_loss": "stop",
    "deterministic": False,
    "noise_scale": False,
    "replica_check_every": None,
}


def comparison_of(job: JobSpec, *, world_size: int | None) -> Comparison:
    """Return the comparison for a job.

    Args:
        job: the user's job.
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
    accumulates = job.train.batch_norm == "local" and _accumulates(job) and batch >= 2 * _LEAST_RANKS * ranks
    return Comparison(
        job=job, world_size=ranks, global_batch_size=batch, grad_accum_steps=_LEAST_RANKS if accumulates else 1
    )


def _accumulates(job: JobSpec) -> bool:
    batch = job.batch
    plan = plan_batch(
        global_batch_size=job.global_batch_size,
        world_size=job.world_size,
        samples=None,
        max_per_device_batch_size=batch.max_per_device_batch_size,
        grad_accum_steps=batch.grad_accum_steps,
        per_device_batch_size=batch.per_device_batch_size,
    )
    return plan.grad_accum_steps > 1
