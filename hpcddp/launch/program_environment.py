"""What a ``command`` finds in its environment: torchrun's variables, the batch contract's numbers, the run's files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hpcddp.batch.job import plan_job
from hpcddp.batch.numbers import batch_variables
from hpcddp.run.directory import AttemptDirectory
from hpcddp.slurm.rank_env import RankEnv
from hpcddp.spec.job import JobSpec


def program_environment(
    spec: JobSpec,
    env: RankEnv,
    attempt: AttemptDirectory,
    *,
    address: str,
    port: int,
    end_time: float | None,
    inherited: Mapping[str, str],
    python: Path,
) -> dict[str, str]:
    """Return what is added to the environment of one rank's program.

    Args:
        spec: the job.
        env: who the rank is.
        attempt: its attempt.
        address: rank 0's host, as this rank reaches it.
        port: a port that is free there.
        end_time: when the job's time is over, in seconds since the epoch; None without a limit.
        inherited: the task's own environment.
        python: the interpreter of the job.

    Raises:
        PlanError: the global batch is not a whole number of equal micro-batches.
    """
    run = attempt.run
    variables = {
        **env.exports(address, port),
        "GROUP_WORLD_SIZE": str(env.nodes),
        "HPCDDP_RUN_ID": run.run_id,
        "HPCDDP_RUN_DIR": str(run.path),
        "HPCDDP_ATTEMPT": str(attempt.number),
        "HPCDDP_REQUEUE_FILE": str(attempt.requeue_file),
        "HPCDDP_PROGRESS_FILE": str(run.progress),
        # A program that is killed leaves what it has printed, and one that crashes below Python leaves its stacks.
        "PYTHONUNBUFFERED": inherited.get("PYTHONUNBUFFERED", "1"),
        "PYTHONFAULTHANDLER": inherited.get("PYTHONFAULTHANDLER", "1"),
        "PATH": _path(spec, inherited, python),
    }
    if end_time is not None:
        variables["HPCDDP_END_TIME"] = f"{end_time:.0f}"
    if spec.batch.global_batch_size is not None:
        plan = plan_job(spec, samples=None)
        variables |= batch_variables(plan.batch, learning_rate=plan.learning_rate)
    return variables


def _path(spec: JobSpec, inherited: Mapping[str, str], python: Path) -> str:
    """Return where programs are looked for: `python` is the job's interpreter, unless somebody has chosen another.

    A virtual environment that hpcddp was called from need not be activated. One that is activated, or what the job file
    prepares, comes first.
    """
    path = inherited.get("PATH", "/usr/local/bin:/usr/bin:/bin")
    asked = spec.environment
    prepared = asked.modules or asked.setup or asked.container or "PATH" in asked.env
    activated = inherited.get("VIRTUAL_ENV") or inherited.get("CONDA_PREFIX")
    return f"{path}:{python.parent}" if prepared or activated else f"{python.parent}:{path}"
