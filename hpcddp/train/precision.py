"""Number formats of parameters, inputs and the forward, and the process-wide switches of torch's backends."""

from __future__ import annotations

import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor

from hpcddp.train.errors import TrainingError

PrecisionName: TypeAlias = Literal["fp32", "tf32", "bf16", "fp16", "fp64"]

_AUTOCAST: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}
# The two settings under which cuBLAS is deterministic (CUDA documentation, "cuBLAS results reproducibility").
_REPEATABLE_WORKSPACES: Final = (":4096:8", ":16:8")


@dataclass(frozen=True, slots=True)
class Precision:
    """One of the five precisions of the job file, on a device.

    Args:
        name: fp32, tf32, bf16, fp16 or fp64.
        device_type: ``cpu`` or ``cuda``.
    """

    name: PrecisionName
    device_type: str

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of real parameters and inputs; see ``kept_in`` for others."""
        return torch.float64 if self.name == "fp64" else torch.float32

    def autocast(self) -> AbstractContextManager[object]:
        """Return the autocast context of a forward pass; it does nothing except in bf16 and fp16."""
        dtype = _AUTOCAST.get(self.name)
        return nullcontext() if dtype is None else torch.autocast(self.device_type, dtype=dtype)

    def scaler(self) -> torch.amp.GradScaler:
        """Return the gradient scaler; it does nothing except in fp16."""
        return torch.amp.GradScaler(self.device_type, enabled=self.name == "fp16")


def kept_in(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a parameter, buffer or input in a training in ``dtype``.

    A complex tensor stays complex, with parts in ``dtype``, because torch multiplies matrices of equal precision only.
    Integer and boolean tensors keep their dtype.
    """
    if tensor.is_complex():
        return dtype.to_complex()
    return dtype if tensor.is_floating_point() else tensor.dtype


def set_up_backends(precision: Precision, *, deterministic: bool) -> None:
    """Set torch's process-wide switches.

    fp32 means 24-bit mantissas everywhere: torch's own default lets convolutions round to TF32.

    Args:
        precision: the precision in use.
        deterministic: whether a rerun on the same build must give the same bits on a GPU too.

    Raises:
        TrainingError: ``CUBLAS_WORKSPACE_CONFIG`` holds a setting under which cuBLAS does not repeat its results.
    """
    _set_products(rounded=precision.name == "tf32")
    if deterministic and precision.device_type == "cuda":
        _check_cublas_workspace()
    # Only a change is made: the call loads torch's compiler.
    if deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = precision.device_type == "cuda" and not deterministic


def _set_products(*, rounded: bool) -> None:
    """Let products of fp32 round to TF32, or not, as torch's old and its new API both say afterwards.

    Setting either API alone leaves the other one behind, and where they differ, reading the old one raises:
    ``allow_tf32`` and ``get_float32_matmul_precision``, which torch's compiler and code of users read
    (https://github.com/pytorch/pytorch/issues/166387). The old API sets its own state and the new one's; the new API
    then writes "ieee" where the old one leaves "none".
    """
    # torch declares no types for these.
    cudnn: Any = torch.backends.cudnn
    with warnings.catch_warnings():
        # Some versions of torch advise against the old API when it is used.
        warnings.filterwarnings("ignore", message="Please use the new API settings to control TF32")
        torch.set_float32_matmul_precision("high" if rounded else "highest")
        cudnn.allow_tf32 = rounded
    for backend in (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn):
        backend.fp32_precision = "tf32" if rounded else "ieee"


def _check_cublas_workspace() -> None:
    # cuBLAS reads the variable at the first matrix product, which comes later.
    setting = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _REPEATABLE_WORKSPACES[0])
    if setting not in _REPEATABLE_WORKSPACES:
        raise TrainingError(
            f"CUBLAS_WORKSPACE_CONFIG is {setting}, under which cuBLAS does not repeat its results, and "
            f"train.deterministic is true; write {' or '.join(_REPEATABLE_WORKSPACES)}, or leave it unset"
        )
