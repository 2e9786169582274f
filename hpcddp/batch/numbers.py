"""The batch contract in a few numbers, for a program that cuts its batches itself."""

from __future__ import annotations

from hpcddp.batch.plan import BatchPlan, PlanError


def per_device_batch_size(batch: BatchPlan) -> int:
    """Return n, of which W ranks in A micro-steps make exactly one global batch: ``B / (W * A)``.

    Args:
        batch: the plan.

    Raises:
        PlanError: W * A does not divide B. The program would see a batch that nobody has stated.
    """
    together = batch.world_size * batch.grad_accum_steps
    size, rest = divmod(batch.global_batch_size, together)
    if rest:
        below = batch.global_batch_size - rest
        raise PlanError(
            f"batch.global_batch_size is {batch.global_batch_size}, which {batch.world_size} ranks x "
            f"{batch.grad_accum_steps} micro-steps do not divide, and a command is told one size for all of them; "
            f"write {f'{below} or ' if below else ''}{below + together}, or use train, which weighs uneven shares",
            below=below,
            above=below + together,
        )
    return size


def batch_variables(batch: BatchPlan, *, learning_rate: float | None) -> dict[str, str]:
    """Return the plan as environment variables of a command.

    Args:
        batch: the plan.
        learning_rate: the rate after the warm-up, scaled by the job's rule; None = unknown.

    Raises:
        PlanError: the global batch is not a whole number of equal micro-batches.
    """
    size = per_device_batch_size(batch)
    variables = {
        "HPCDDP_GLOBAL_BATCH_SIZE": str(batch.global_batch_size),
        "HPCDDP_PER_DEVICE_BATCH_SIZE": str(size),
        "HPCDDP_GRAD_ACCUM_STEPS": str(batch.grad_accum_steps),
        "HPCDDP_RANK_BATCH_SIZE": str(size * batch.grad_accum_steps),
    }
    if learning_rate is not None:
        variables["HPCDDP_LEARNING_RATE"] = repr(learning_rate)
    return variables
