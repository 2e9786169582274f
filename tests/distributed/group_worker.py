"""One rank of a process group: ``group_worker.py ATTEMPT_DIR RANK WORLD_SIZE NODES VERSION TIMEOUT_S``.

All nodes are this host. It prints the port of torch's store and a sum.
"""

import os
import sys
from contextlib import ExitStack
from datetime import timedelta

import torch
import torch.distributed as dist

from hpcddp.errors import HpcddpError
from hpcddp.run.directory import AttemptDirectory
from hpcddp.slurm.rank_env import RankEnv
from hpcddp.task.attribution import failure_record
from hpcddp.task.rendezvous import Identity, meet
from hpcddp.task.work import opening
from hpcddp.train.distributed import process_group


def main() -> int:
    directory, rank, world_size, nodes, version, timeout_s = sys.argv[1:]
    torch.set_num_threads(1)
    attempt = AttemptDirectory.from_text(directory)
    local = int(world_size) // int(nodes)
    env = RankEnv(
        rank=int(rank),
        local_rank=int(rank) % local,
        world_size=int(world_size),
        local_world_size=local,
        node_rank=int(rank) // local,
        nodes=int(nodes),
        hosts=tuple(f"n{node + 1}" for node in range(int(nodes))),
        tasks_per_node=(local,) * int(nodes),
        source="slurm",
    )
    timeout = timedelta(seconds=float(timeout_s))
    identity = Identity(host=env.host_of(env.rank) or "", must_agree={"hpcddp": version})
    try:
        meeting = meet(env, attempt, identity, timeout=timeout)
        print(meeting.port, flush=True)
        if meeting.interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = meeting.interface
        with ExitStack() as stack:
            with opening(attempt, timeout):
                stack.enter_context(
                    process_group(
                        env,
                        address=meeting.address,
                        port=meeting.port,
                        listener=meeting.listener,
                        device=torch.device("cpu"),
                        rendezvous_timeout=timeout,
                        hang_timeout=timedelta(seconds=30),
                    )
                )
            total = torch.tensor(float(rank))
            dist.all_reduce(total)
            print(total.item(), flush=True)
    except (HpcddpError, RuntimeError) as error:
        record = failure_record(error)
        print(record.kind, record.message, flush=True)
        return record.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
