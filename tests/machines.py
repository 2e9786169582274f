"""Trees of /dev, /proc and /sys, as Linux shows machines with GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """A node with GPUs.

    Args:
        numa_nodes: the CPUs of each NUMA node, as Linux writes them.
        gpus: the PCI address of each GPU in their order, and its NUMA node.
        minors: the number of the file in /dev of each GPU of NVIDIA; of AMD's GPUs there are none.
    """

    numa_nodes: Sequence[str]
    gpus: Sequence[tuple[str, int]]
    minors: Sequence[int] = ()

    def write(self, root: Path, *, denied: Sequence[int] = ()) -> None:
        """Write the tree.

        Args:
            denied: the numbers of GPUs that the job may not open.
        """
        write_file(root / "sys/devices/system/cpu/online", f"0-{self.cpus - 1}")
        for number, (address, numa_node) in enumerate(self.gpus):
            device = root / "sys/bus/pci/devices" / address
            write_file(device / "device", "0x2330")
            cpus = f"0-{self.cpus - 1}" if numa_node < 0 else self.numa_nodes[numa_node]
            write_file(device / "local_cpulist", cpus)
            if self.minors:
                information = f"Model: \t\t GPU\nBus Location: \t {address}\nDevice Minor: \t {self.minors[number]}"
                write_file(root / f"proc/driver/nvidia/gpus/{address}/information", information)
                file = root / f"dev/nvidia{self.minors[number]}"
            else:
                (device / f"drm/renderD{128 + number}").mkdir(parents=True)
                driver = root / "sys/bus/pci/drivers/amdgpu"
                driver.mkdir(parents=True, exist_ok=True)
                (driver / address).symlink_to(device)
                write_file(root / "dev/kfd", "")
                file = root / f"dev/dri/renderD{128 + number}"
            if number not in denied:
                write_file(file, "")

    @property
    def cpus(self) -> int:
        """How many CPUs it has."""
        return 1 + max(int(part.rpartition("-")[2]) for cpus in self.numa_nodes for part in cpus.split(","))


def write_file(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def _numa_nodes(count: int, cores: int, threads: int = 2) -> list[str]:
    """Return the CPUs of NUMA nodes; the second threads of all cores are numbered behind all first ones."""
    firsts = [[cores * (node + count * thread) for thread in range(threads)] for node in range(count)]
    return [",".join(f"{first}-{first + cores - 1}" for first in of_node) for of_node in firsts]


def _gpus(buses: str, nodes: Sequence[int]) -> list[tuple[str, int]]:
    return [(f"0000:{bus}:00.0", node) for bus, node in zip(buses.split(), nodes, strict=True)]


DGX_H100 = Machine(
    numa_nodes=_numa_nodes(2, 56), gpus=_gpus("1b 43 52 61 9d c3 d1 df", [0] * 4 + [1] * 4), minors=range(8)
)
# Eight NUMA nodes, of which four have GPUs; the files in /dev have another order than the bus.
DGX_A100 = Machine(
    numa_nodes=_numa_nodes(8, 16),
    gpus=_gpus("07 0f 47 4e 87 90 b7 bd", [3, 3, 1, 1, 7, 7, 5, 5]),
    minors=[2, 3, 0, 1, 6, 7, 4, 5],
)
LUMI = Machine(numa_nodes=_numa_nodes(4, 16), gpus=_gpus("c1 c6 c9 ce d1 d6 d9 de", [3, 3, 1, 1, 0, 0, 2, 2]))
GH200 = Machine(
    numa_nodes=_numa_nodes(4, 72, threads=1), gpus=[(f"00{part}9:01:00.0", part) for part in range(4)], minors=range(4)
)
