"""Whether torchvision builds the model of a job with its arguments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

from hpcddp.jobfile.datasets import DATASETS
from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.sections import Train

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
        build_model(name, json.loads(arguments), int(classes))
    refusal = None
except ModelError as error:
    # Another error may be one of the meta device.
    if not isinstance(error.__cause__, (TypeError, ValueError)):
        raise
    refusal = error.message
os.write(answer, json.dumps(refusal).encode())
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


def model_refusal(spec: JobSpec, *, directory: Path, timeout_s: float = 60.0) -> str | None:
    """Return why torchvision does not build the model of a training; None if it does, or if this machine cannot tell.

    A child process builds it on torch's meta device, which gives tensors no memory.

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
        refusal = json.loads(done.stdout)
    except ValueError:
        # The user's code has ended the process itself.
        return None
    return refusal if isinstance(refusal, str) else None
