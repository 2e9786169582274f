"""The vendors of GPUs: a row for each holds all in which they differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Vendor:
    """A vendor of GPUs.

    Args:
        version_name: the name in ``torch.version`` that is not None in torch's builds for these GPUs.
        visible_devices: the variables that hide GPUs from torch, in the order in which they are applied.
        container_option: what makes apptainer show the GPUs to a container.
        smi: the program that shows the GPUs, and whether they are well.
        device_files: the files in /dev of which one is there if GPUs are, as patterns.
        hardware_errors: how drivers and libraries name a GPU, or a link between GPUs, that is broken; in lower case.
    """

    name: str
    platform: str
    collectives: str
    version_name: str
    visible_devices: tuple[str, ...]
    container_option: str
    smi: str
    device_files: tuple[str, ...]
    hardware_errors: tuple[str, ...]

    def explain_no_gpu(self, environment: Mapping[str, str]) -> str:
        """Return the way out if torch sees none of the GPUs of its node.

        Args:
            environment: the variables of torch's process.
        """
        hiding = [f"{name}={environment[name]}" for name in self.visible_devices if name in environment]
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
        visible_devices=("CUDA_VISIBLE_DEVICES",),
        container_option="--nv",
        smi="nvidia-smi",
        # Of a GPU, of a Jetson (two names), and of Windows.
        device_files=("nvidia[0-9]*", "nvhost-gpu", "nvgpu", "dxg"),
        # driver_types.h of CUDA, nvml.h, NCCL, and the driver.
        hardware_errors=(
            "uncorrectable ecc error",
            "uncorrectable nvlink error",
            "fallen off the bus",
            "gpu is lost",
            "nvrm: xid",
            "xid error",
        ),
    ),
    Vendor(
        name="AMD",
        platform="ROCm",
        collectives="RCCL",
        version_name="hip",
        # ROCr applies the first; HIP applies one of the others to what is left.
        visible_devices=("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
        container_option="--rocm",
        smi="rocm-smi (or amd-smi)",
        device_files=("kfd",),
        # hipGetErrorString; ROCr's handlers of exceptions and of memory faults (runtime.cpp); amdgpu. A hang of a GPU,
        # and most of HSA_STATUS_ERROR, may as well come from a kernel of the user.
        hardware_errors=(
            "uncorrectable ecc error",
            "reason :ecc",
            "dram ecc failure",
            "sram ecc failure",
            "uncorrectable hardware error(",
        ),
    ),
)
DEVICES = Path("/dev")


def vendor_here() -> Vendor | None:
    """Return the vendor of this machine's GPUs, by their device files; None if there are none."""
    for vendor in VENDORS:
        if any(any(DEVICES.glob(pattern)) for pattern in vendor.device_files):
            return vendor
    return None


def vendor_of_torch(versions: Mapping[str, object]) -> Vendor | None:
    """Return the vendor that torch was built for; None for CPUs only.

    Args:
        versions: what ``torch.version`` holds.
    """
    return next((vendor for vendor in VENDORS if versions.get(vendor.version_name) is not None), None)
