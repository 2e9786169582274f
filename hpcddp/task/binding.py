"""The CPUs to which a task is bound, and its GPU with the CPUs near it, as Linux shows them.

No library of a vendor is loaded: a command has none, and their start takes seconds.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from hpcddp.jobfile.job import JobSpec
from hpcddp.run.job_records import Binding
from hpcddp.slurm.hostlist import ranges_text
from hpcddp.slurm.rank_env import RankEnv
from hpcddp.vendors import read_system_file, vendor_here


def binding_of(spec: JobSpec, env: RankEnv, environment: Mapping[str, str]) -> Binding | None:
    """Return to what srun has bound this task; None where it may use all CPUs of its node, or srun did not start it.

    Call it before torch is imported: OpenMP's library may bind the process again.
    """
    cpus = ranges_text(os.sched_getaffinity(0))
    if env.source != "slurm" or cpus == read_system_file("sys/devices/system/cpu/online"):
        return None
    address = _gpu_address(spec, env.local_rank, environment)
    return Binding(
        cpus=cpus,
        cpus_needed=spec.cpus_per_task,
        gpu_address=address,
        gpu_cpus=read_system_file(f"sys/bus/pci/devices/{address}/local_cpulist"),
    )


def _gpu_address(spec: JobSpec, local_rank: int, environment: Mapping[str, str]) -> str:
    """Return the PCI address of a task's GPU: the only one that it sees, or the one with its number.

    Returns:
        An empty text where it is not known: CUDA begins with the fastest kind of GPUs, and ROCm puts those of a kind
        together; the task of a launcher has several GPUs; a part of a GPU has no address of its own.
    """
    vendor = vendor_here()
    if vendor is None or not spec.uses_gpus:
        return ""
    addresses = vendor.gpu_addresses()
    kinds = {read_system_file(f"sys/bus/pci/devices/{address}/device") for address in addresses}
    try:
        for name in vendor.hiding(environment):
            addresses = [addresses[int(number)] for number in environment[name].split(",")]
    except (ValueError, IndexError):
        return ""
    if len(kinds) > 1 or len(addresses) not in {1, spec.tasks_per_node}:
        return ""
    return addresses[local_rank % len(addresses)]
