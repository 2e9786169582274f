"""Clusters that there could be."""

from __future__ import annotations

from typing import Any

from hpcddp.jobfile.cluster import Accounts, ClusterFacts, NodeKind, Partition, Preemption

CPU_NODES = NodeKind(nodes=100, available=98, cpus=64, mem_mb=256000)
V100_NODES = NodeKind(nodes=4, available=4, cpus=40, mem_mb=512000, gpus=4, gpu_types={"v100": 4})
A100_NODES = NodeKind(nodes=2, available=2, cpus=128, mem_mb=1024000, gpus=8, gpu_types={"a100": 8})


def university(**fields: Any) -> ClusterFacts:
    """Return the facts of a cluster with a bit of everything."""
    return ClusterFacts(
        **{
            "name": "hpc1",
            "slurm": "23.11.4",
            "looked_at": "2026-11-21",
            "user": "ada",
            "groups": ("physics",),
            "memory_is_shared_out": True,
            "max_array_size": 1001,
            "accounts": Accounts(required=True, default="lab", names=("grant", "lab"), qos=("long", "normal")),
            "preemption": Preemption(type="partition_prio", mode="REQUEUE"),
            "partitions": {
                "batch": Partition(
                    default=True,
                    max_time="3-00:00:00",
                    default_time="01:00:00",
                    default_mem="2000M per CPU",
                    kinds=(CPU_NODES,),
                ),
                "gpu.v100": Partition(max_time="1-00:00:00", max_nodes=3, grace_time_s=60, kinds=(V100_NODES,)),
                "gpu": Partition(kinds=(A100_NODES, V100_NODES), preempt_mode="CANCEL", allow_accounts=("grant",)),
                "secret": Partition(hidden=True, allow_groups=("chemistry",), kinds=(A100_NODES,)),
                "old": Partition(state="DOWN", kinds=(CPU_NODES,)),
            },
            **fields,
        }
    )


def laptop() -> ClusterFacts:
    """Return the facts of one node, one partition, and nothing else."""
    return ClusterFacts(
        name="tiny",
        looked_at="2026-11-21",
        user="ada",
        partitions={
            "all": Partition(default=True, kinds=(NodeKind(nodes=1, available=1, cpus=1, mem_mb=2000),)),
        },
    )
