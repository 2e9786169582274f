"""What makes the ranks of an attempt slow, as records and logs show it: wrong CPUs, and sockets between the nodes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

from hpcddp.manage.status import RunStatus
from hpcddp.run.files import read_tail
from hpcddp.run.job_records import Binding, known_ranks
from hpcddp.slurm.hostlist import HostListError, expand

# What NCCL and RCCL print with NCCL_DEBUG=INFO, when the process group opens.
_SOCKETS: Final = re.compile("NCCL INFO .*(?:network |NET/)Socket")
_LOG_BYTES: Final = 1 << 24


def hindrances(status: RunStatus) -> Iterator[str]:
    """Yield a sentence with the way out for each: of the network, and of the first node on which CPUs are wrong."""
    attempt = status.run.attempt(status.files.attempt or 0)
    bindings_by_host: dict[str, list[Binding]] = {}
    for rank in known_ranks(attempt):
        bindings = bindings_by_host.setdefault(rank.host, [])
        if rank.binding is not None:
            bindings.append(rank.binding)
    if len(bindings_by_host) > 1 and _SOCKETS.search(read_tail(attempt.rank_log(0), _LOG_BYTES)):
        yield (
            "NCCL or RCCL talks over TCP sockets between the nodes, as the log of rank 0 says: if the nodes have "
            "InfiniBand, Slingshot or EFA, load its plugin (environment.modules), or bind it into the container"
        )
    # Damaged numbers say nothing.
    with suppress(HostListError):
        for host, bindings in bindings_by_host.items():
            sentence = _wrong_cpus(host, bindings)
            if sentence:
                yield sentence
                break


def _wrong_cpus(host: str, bindings: Sequence[Binding]) -> str | None:
    """Return that the ranks of a node share too few CPUs, or run on other NUMA nodes than their GPUs; None if not."""
    cpus_needed = sum(binding.cpus_needed for binding in bindings)
    allowed = {binding.cpus for binding in bindings}
    if len(allowed) == 1 and len(_cpus(*allowed)) < cpus_needed:
        return (
            f"the ranks on {host} share the CPUs {min(allowed)}, and need {cpus_needed}: give each rank its own with "
            "resources.srun: {cpu-bind: cores}"
        )
    far = [
        binding for binding in bindings if binding.gpu_cpus and _cpus(binding.cpus).isdisjoint(_cpus(binding.gpu_cpus))
    ]
    if not far:
        return None
    numa_nodes = ",".join(binding.gpu_numa_node for binding in bindings)
    return (
        f"{len(far)} of {len(bindings)} ranks on {host} run on CPUs of another NUMA node than that of their GPU, such "
        f"as one with CPUs {far[0].cpus}, whose GPU {far[0].gpu_address} is on node {far[0].gpu_numa_node} with CPUs "
        f"{far[0].gpu_cpus}; in a job of whole nodes (resources.exclusive), place them with "
        f'resources.srun: {{cpu-bind: "map_ldom:{numa_nodes}"}}'
    )


def _cpus(text: str) -> set[str]:
    """Return the numbers of CPUs, in digits."""
    return set(expand(f"[{text}]"))
