"""The vendors of GPUs: a row for each holds all in which they differ."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT = Path("/")
"""Where /dev, /proc and /sys are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vendor:
    """A vendor of GPUs.

    Args:
        version_name: the name in ``torch.version`` that is not None in torch's builds for these GPUs.
        visible_devices: the variables that hide GPUs from torch, in the order in which they are applied; of those that
            stand together, the first one that is not empty.
        container_option: what makes apptainer show the GPUs to a container.
        smi: the program that shows the GPUs, and whether they are well.
        device_files: the files of which one is there if GPUs are, as patterns.
        gpu_files: the files or directories of which each GPU has one, as a pattern.
        gpu_numbers: what matches the PCI address and the number of a GPU in the path and the text of its file.
        gpu_device: the file that a process opens to use the GPU, with its number as group 2.
        hardware_errors: how libraries tell a process that a GPU, or a link between GPUs, is broken; in lower case.
    """

    name: str
    platform: str
    collectives: str
    version_name: str
    visible_devices: tuple[tuple[str, ...], ...]
    container_option: str
    smi: str
    device_files: tuple[str, ...]
    gpu_files: str
    gpu_numbers: str
    gpu_device: str
    hardware_errors: tuple[str, ...]

    def hiding(self, environment: Mapping[str, str]) -> Iterator[str]:
        """Yield the names of the variables that hide GPUs from torch, in the order in which they are applied."""
        for alternatives in self.visible_devices:
            yield from [name for name in alternatives if environment.get(name)][:1]

    def gpu_addresses(self) -> list[str]:
        """Return the PCI addresses of the GPUs that this process may open, in the order of the bus."""
        addresses = []
        for path in sorted(ROOT.glob(self.gpu_files)):
            match = re.search(self.gpu_numbers, f"{path} {read_system_file(path)}", re.DOTALL)
            # The kernel asks the device cgroup too.
            if match and os.access(ROOT / match.expand(self.gpu_device), os.R_OK):
                addresses.append(match[1])
        return addresses

    def explain_no_gpu(self, environment: Mapping[str, str]) -> str:
        """Return the way out if torch sees none of the GPUs of its node.

        Args:
            environment: the variables of torch's process.
        """
        hiding = [f"{name}={environment[name]}" for name in self.hiding(environment)]
        if len(hiding) > 1:
            # gres.conf(5): without flags and AutoDetect, Slurm sets the variables of all vendors.
            return (
                f"{' and '.join(hiding)} hide GPUs one after the other; unset all but the first in the task, or ask "
                "your site for Flags=amd_gpu_env in gres.conf"
            )
        return f"{self.smi} shows whether the driver sees a GPU"


# The first one is assumed where no device file is known.
VENDORS: Final = (
    Vendor(
        name="NVIDIA",
        platform="CUDA",
        collectives="NCCL",
        version_name="cuda",
        visible_devices=(("CUDA_VISIBLE_DEVICES",),),
        container_option="--nv",
        smi="nvidia-smi",
        # Of a GPU, of a Jetson (two names), and of Windows.
        device_files=("dev/nvidia[0-9]*", "dev/nvhost-gpu", "dev/nvgpu", "dev/dxg"),
        gpu_files="proc/driver/nvidia/gpus/*/information",
        gpu_numbers=r"gpus/([^/]+)/.+Device Minor:\s*([0-9]+)",
        gpu_device=r"dev/nvidia\2",
        # cudaGetErrorString, what health checks quote of the driver, and nvmlErrorString. Not an Xid as such: many come
        # from an error of the program.
        hardware_errors=(
            "uncorrectable ecc error encountered",
            "uncorrectable nvlink error",
            "fallen off the bus",
            "gpu is lost",
        ),
    ),
    Vendor(
        name="AMD",
        platform="ROCm",
        collectives="RCCL",
        version_name="hip",
        # ROCr applies the first one, and HIP counts one of the others among the GPUs that are left.
        visible_devices=(("ROCR_VISIBLE_DEVICES",), ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")),
        container_option="--rocm",
        smi="rocm-smi (or amd-smi)",
        device_files=("dev/kfd",),
        gpu_files="sys/bus/pci/drivers/amdgpu/*/drm/renderD*",
        gpu_numbers="amdgpu/([^/]+)/drm/renderD([0-9]+)",
        gpu_device=r"dev/dri/renderD\2",
        # hipGetErrorString; ROCr's handlers of exceptions and of memory faults (runtime.cpp). Not a hang of a GPU, nor
        # HSA_STATUS_ERROR: a kernel of the user may be the reason.
        hardware_errors=(
            "uncorrectable ecc error encountered",
            "reason :ecc",
            "dram ecc failure",
            "sram ecc failure",
        ),
    ),
)


def read_system_file(path: Path | str) -> str:
    """Return the text of a file of Linux without the end of its line; empty where it cannot be read."""
    try:
        return (ROOT / path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def vendor_here() -> Vendor | None:
    """Return the vendor of this machine's GPUs, by their device files; None if there are none."""
    for vendor in VENDORS:
        if any(any(ROOT.glob(pattern)) for pattern in vendor.device_files):
            return vendor
    return None


def vendor_of_torch(versions: Mapping[str, object]) -> Vendor | None:
    """Return the vendor that torch was built for; None for CPUs only.

    Args:
        versions: what ``torch.version`` holds.
    """
    return next((vendor for vendor in VENDORS if versions.get(vendor.version_name) is not None), None)
