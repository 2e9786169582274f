"""The memory that the state of a model needs on each GPU, and the memory that a GPU has."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from hpcddp.jobfile.datasets import DATASETS
from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.sections import Train

# GiB of the largest GPU that is sold under a name (datasheets of NVIDIA and AMD): a finding must hold for all of them.
_LARGEST_GIB: Final = MappingProxyType(
    {
        "k80": 12, "p40": 24, "p100": 16, "v100": 32, "t4": 16, "rtx6000": 48, "rtx8000": 48, "a10": 24, "a30": 24,
        "a40": 48, "a100": 80, "l4": 24, "l40": 48, "l40s": 48, "h100": 94, "h200": 141, "b200": 192, "gh200": 144,
        "mi100": 32, "mi210": 64, "mi250": 64, "mi250x": 64, "mi300a": 128, "mi300x": 192,
    }
)  # fmt: skip
_WORD: Final = re.compile("[a-z0-9]+")
_STATED_GIB: Final = re.compile("([0-9]{1,3})gb?", re.ASCII)


def gpu_memory_gib(gpu_type: str) -> int | None:
    """Return the most memory that a GPU of a type can have, in GiB; None for a type that is not known.

    Args:
        gpu_type: the name that the site gives it, such as ``a100``, ``nvidia_a100-sxm4-40gb`` or ``tesla_v100``.
    """
    words = _WORD.findall(gpu_type.lower())
    stated = [int(match[1]) for word in words if (match := _STATED_GIB.fullmatch(word))]
    listed = [_LARGEST_GIB[word] for word in words if word in _LARGEST_GIB]
    return next(iter([*stated, *listed]), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """The memory that the state of a training needs on each rank.

    Args:
        parameters: parameters of the model.
        total: bytes.
        description: what is counted.
    """

    parameters: int
    total: int
    description: str


def state_bytes(train: Train, parameters: int) -> StateBytes:
    """Return the memory of a training's model, gradients and optimizer.

    Args:
        parameters: parameters of its model.
    """
    number_bytes = 8 if train.precision == "fp64" else 4
    parts = ["parameters", "gradients"]
    copies = 2
    if train.optimizer.name == "adamw":
        parts.append("two moments of AdamW")
        copies += 2
    elif train.optimizer.momentum:
        parts.append("momentum")
        copies += 1
    if train.ema_decay is not None:
        parts.append("averaged weights")
        copies += 1
    description = f"{number_bytes} bytes each for {', '.join(parts[:-1])} and {parts[-1]}"
    return StateBytes(parameters=parameters, total=parameters * copies * number_bytes, description=description)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltModel:
    """What building a model has shown.

    Args:
        parameters: its parameters; None if torchvision refuses to build it.
        refusal: why torchvision does not build it with its arguments; None if it does.
    """

    parameters: int | None = None
    refusal: str | None = None


# As in hpcddp.batch.samples: what the user's code prints does not reach the pipe.
_PROGRAM: Final = """
import json, os, sys
directory, name, arguments, classes = sys.argv[1:]
answer = os.dup(1)
os.dup2(2, 1)
sys.path.insert(0, directory)
import torch
from hpcddp.train.errors import ModelError
from hpcddp.train.model.models import build_model
try:
    with torch.device("meta"):
        model = build_model(name, json.loads(arguments), int(classes))
    built = {"parameters": sum(parameter.numel() for parameter in model.parameters())}
except ModelError as error:
    # Another error may be one of the meta device.
    if not isinstance(error.__cause__, (TypeError, ValueError)):
        raise
    built = {"refusal": error.message}
os.write(answer, json.dumps(built).encode())
"""
_MOST_CLASSES: Final = 1000


def _class_count(train: Train) -> int:
    """Return the number of classes: that of the job, else of its data set, else the most that a data set has."""
    if train.num_classes is not None:
        return train.num_classes
    dataset = DATASETS.get(train.dataset)
    if dataset is not None and dataset.classes is not None:
        return dataset.classes
    return _MOST_CLASSES


def build_on_meta(spec: JobSpec, *, directory: Path, timeout_s: float = 60.0) -> BuiltModel | None:
    """Build the model of a training on torch's meta device, which gives tensors no memory, in a child process.

    None: this machine does not show whether the model can be built.

    Args:
        directory: the directory of submission, in which the user's own modules are found.
        timeout_s: how long building may take, in seconds.
    """
    train = spec.train
    if train is None:
        return None
    python = spec.environment.interpreter or sys.executable
    words = [str(directory), train.model, json.dumps(dict(train.model_args)), str(_class_count(train))]
    try:
        done = subprocess.run(
            [python, "-P", "-c", _PROGRAM, *words],
            cwd=directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    try:
        return BuiltModel(**json.loads(done.stdout))
    except (ValueError, TypeError):
        # The user's code has ended the process itself.
        return None
