"""One rank of a process group on this host: ``group_worker.py ATTEMPT_DIR RANK WORLD_SIZE VERSION TIMEOUT_S``."""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from hpcddp.errors import HpcddpError
from hpcddp.run.directory import AttemptDirectory
from hpcddp.slurm.rank_env import RankEnv
from hpcddp.task.rendezvous import meet, raise_if_a_rank_failed
from hpcddp.train.distributed import Identity, process_group


def main() -> int:
    directory, rank, world_size, version, timeout_s = sys.argv[1:]
    torch.set_num_threads(1)
    attempt = AttemptDirectory.from_text(directory)
    env = RankEnv(
        rank=int(rank),
        local_rank=int(rank),
        world_size=int(world_size),
        local_world_size=int(world_size),
        node_rank=0,
        nodes=1,
        hosts=("n1",),
        tasks_per_node=(int(world_size),),
        source="slurm",
    )
    timeout = timedelta(seconds=float(timeout_s))
    identity = Identity(host="n1", hpcddp=version, python="3", torch="2", job="x", attempt=0, gpu=None)
    try:
        meeting = meet(env, attempt, own_host="n1", timeout=timeout)
        with process_group(
            env,
            address=meeting.address,
            port=meeting.port,
            token=meeting.token,
            listener=meeting.listener,
            identity=identity,
            device=torch.device("cpu"),
            rendezvous_timeout=timeout,
            hang_timeout=timedelta(seconds=30),
            watch=lambda: raise_if_a_rank_failed(attempt),
        ):
            total = torch.tensor(float(rank))
            dist.all_reduce(total)
            print(total.item(), flush=True)
    except HpcddpError as error:
        print(error.kind, error.message, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
