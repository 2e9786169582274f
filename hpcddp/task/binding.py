"""The CPUs to which a task is bound, and its GPU with the CPUs near it, as Linux shows them.

No library of a vendor is loaded: a command has none, and their start takes seconds.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from hpcddp.jobfile.job import JobSpec
from hpcddp.run.job_records import Binding
from hpcddp.slurm.hostlist import ranges_text
from hpcddp.slurm.rank_env import RankEnv

ROOT = Path("/")
"""Where /dev, /proc and /sys are."""


def binding_of(spec: JobSpec, env: RankEnv, environment: Mapping[str, str]) -> Binding | None:
    """Return to what srun has bound this task; None where it may use all CPUs of its node, or srun did not start it.

    Call it before torch is imported: OpenMP's library may bind the process again.
    """
    cpus = ranges_text(os.sched_getaffinity(0))
    if env.source != "slurm" or cpus == _read("sys/devices/system/cpu/online"):
        return None
    address = ""
    if spec.tasks_per_node == spec.resources.gpus_per_node:
        address = _gpu_address(environment, env.local_rank)
    return Binding(
        cpus=cpus,
        cpus_needed=spec.cpus_per_task,
        gpu_address=address,
        gpu_numa_node=_read(f"sys/bus/pci/devices/{address}/numa_node"),
        gpu_cpus=_read(f"sys/bus/pci/devices/{address}/local_cpulist"),
    )


def _gpu_address(environment: Mapping[str, str], local_rank: int) -> str:
    """Return the PCI address of the GPU of a rank: of the only one that it sees, or of that with its number."""
    addresses = list(_gpu_addresses())
    try:
        for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
            if name in environment:
                addresses = [addresses[int(number)] for number in environment[name].split(",")]
        return addresses[0 if len(addresses) == 1 else local_rank]
    except (ValueError, IndexError):
        # Names of GPUs or of their parts, which are not looked up, or no GPU.
        return ""


def _gpu_addresses() -> Iterator[str]:
    """Yield the addresses of the GPUs that this task may open, in the order in which CUDA and ROCm number them."""
    for path in sorted(ROOT.glob("proc/driver/nvidia/gpus/*/information")):
        for minor in re.findall(r"Device Minor:\s*([0-9]+)", _read(path)):
            # The kernel asks the device cgroup too.
            if os.access(ROOT / f"dev/nvidia{minor}", os.R_OK):
                yield path.parent.name
    for path in sorted(ROOT.glob("sys/bus/pci/drivers/amdgpu/*/drm/renderD*")):
        if os.access(ROOT / "dev/dri" / path.name, os.R_OK):
            yield path.parents[1].name


def _read(path: Path | str) -> str:
    """Return the text of a file without the end of its line; empty where it cannot be read."""
    try:
        return (ROOT / path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""
