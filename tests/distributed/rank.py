"""One rank of a test's training; its plan lists jobs to run one after the other."""

from __future__ import annotations

import json
import os
import traceback
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpcddp.errors import HpcddpError
from hpcddp.jobfile.job import JobSpec
from hpcddp.run.directory import RunDirectory
from hpcddp.slurm.rank_env import RankEnv
from hpcddp.stop import faults
from hpcddp.stop.reasons import StopReason
from hpcddp.train.context import TrainContext
from hpcddp.train.errors import StoppedError
from hpcddp.train.loop import loop
from hpcddp.train.loop.agreement import block_length
from hpcddp.train.loop.job import run_training


def main(plan_path: Path, rank: int) -> int:
    plan = json.loads(plan_path.read_text())
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{plan['store']}",
        rank=rank,
        world_size=plan["world_size"],
        timeout=timedelta(seconds=60),
    )
    code = 0
    for job in plan["jobs"]:
        try:
            run_training(context_of(job, rank, plan["world_size"]))
            code = 0
        except HpcddpError as error:
            traceback.print_exc()
            code = int(error.exit_code)
            report = {"kind": error.kind, "message": error.message, "exit_code": code}
            plan_path.with_name(f"error-{rank}.json").write_text(json.dumps(report))
            # After a stop all ranks stand at the same place; after anything else nothing may be waited for.
            if not isinstance(error, StoppedError):
                return code
            # Rank 0 has still to write.
            dist.barrier()
    dist.barrier()
    dist.destroy_process_group()
    return code


def _fixed_length(steps: int, _step_s: float) -> int:
    return steps


def context_of(job: dict[str, Any], rank: int, world_size: int) -> TrainContext:
    run = RunDirectory(Path(job["run"]))
    # Not before: an attempt that is there already fences those before it.
    run.attempt(job.get("attempt", 0)).path.mkdir(parents=True, exist_ok=True)
    steps = job.get("block_length")
    loop.block_length = block_length if steps is None else partial(_fixed_length, steps)  # type: ignore[attr-defined]
    stop_at = job.get("stop_after_calls") if rank == job.get("stop_rank", 0) else None
    kill_at = job.get("kill_after_calls")
    faults.arm(job.get("faults"), rank=rank, attempt=job.get("attempt", 0))
    calls = 0

    def stop_reason() -> StopReason:
        nonlocal calls
        calls += 1
        if kill_at is not None and calls > kill_at:
            os.kill(os.getpid(), 9)
        return StopReason.WARNED if stop_at is not None and calls > stop_at else StopReason.NONE

    return TrainContext(
        spec=JobSpec.model_validate(job["spec"]),
        rank_env=RankEnv(
            rank=rank,
            local_rank=rank,
            world_size=world_size,
            local_world_size=world_size,
            node_rank=0,
            nodes=1,
            source="torchrun",
        ),
        device=torch.device("cpu"),
        run=run,
        attempt=job.get("attempt", 0),
        threads=1,
        stop_reason=stop_reason,
    )
