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
# Linux has at most 8192 CPUs (CONFIG_NR_CPUS).
_CPU_DIGITS: Final = 5


def hindrances(status: RunStatus) -> Iterator[str]:
    """Yield a sentence with the way out for each: of the network, and of the first node on which CPUs are wrong."""
    attempt = status.run.attempt(status.files.attempt or 0)
    ranks = known_ranks(attempt)
    bindings_by_host: dict[str, list[Binding]] = {}
    for rank in ranks:
        if rank.binding is not None:
            bindings_by_host.setdefault(rank.host, []).append(rank.binding)
    if len({rank.host for rank in ranks}) > 1 and _SOCKETS.search(read_tail(attempt.rank_log(0), _LOG_BYTES)):
        yield (
            "NCCL or RCCL talks over TCP sockets between the nodes, says the log of rank 0: if they have InfiniBand, "
            "Slingshot or EFA, load its library or plugin (environment.modules), or mount it into the container"
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
    sets = {binding.cpus for binding in bindings}
    allowed = _mask(",".join(sets))
    if len(sets) == 1 and allowed.bit_count() < cpus_needed:
        return (
            f"all ranks on {host} run on the same CPUs ({min(sets)}), and the job asks for {cpus_needed} there: give "
            "each task its own with resources.srun: {cpu-bind: cores}"
        )
    far = [binding for binding in bindings if binding.gpu_cpus and not _mask(binding.cpus) & _mask(binding.gpu_cpus)]
    if not far:
        return None
    masks = [hex(allowed & _mask(binding.gpu_cpus)) for binding in bindings]
    # srun takes only CPUs that the step has, and NUMA nodes (map_ldom) only where it has all CPUs of a node.
    way_out = f'in whole nodes (resources.exclusive) use resources.srun: {{cpu-bind: "mask_cpu:{",".join(masks)}"}}'
    if "0x0" in masks:
        way_out = "raise resources.cpus_per_task, until the job has CPUs beside each GPU"
    return (
        f"{len(far)} of {len(bindings)} ranks on {host} run on another NUMA node than that of their GPU: one has CPUs "
        f"{far[0].cpus}, and its GPU {far[0].gpu_address} is beside CPUs {far[0].gpu_cpus}; {way_out}"
    )


def _mask(cpus: str) -> int:
    """Return the mask of CPUs, which has a bit for each.

    Raises:
        HostListError: they are no numbers of CPUs.
    """
    numbers = set(expand(f"[{cpus}]"))
    if any(len(number) > _CPU_DIGITS for number in numbers):
        raise HostListError(f"{cpus} has a number that no CPU has")
    return sum(1 << int(number) for number in numbers)
