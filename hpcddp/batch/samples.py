"""The number of samples in the training data.

The user's code runs in a child process, so that torch is not loaded here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcddp.errors import UserError
from hpcddp.jobfile.datasets import DATASETS, Dataset
from hpcddp.jobfile.sections import Batch, Train

# torchvision.datasets.folder.IMG_EXTENSIONS; a test compares the two.
IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


@dataclass(frozen=True, slots=True)
class SampleCount:
    """How many samples the training data has.

    Args:
        samples: N; None when it is unknown.
        note: why it is unknown, or why the job will fail, and what to do; None otherwise.
        classes: the classes of the data that was read; None where it was not, or does not tell.
    """

    samples: int | None
    note: str | None = None
    classes: int | None = None


def count_samples(train: Train, batch: Batch, *, directory: Path, python: str, timeout_s: float = 60.0) -> SampleCount:
    """Return the number of samples in the training data of a job.

    The sizes of the built-in datasets are known, images in a folder are counted as torchvision does, and the user's own
    dataset is created in a child process. Groups are counted by the job alone.

    Args:
        train: the job's ``train`` section.
        batch: the job's ``batch`` section.
        directory: the directory of submission, which relative paths and imports start from.
        python: the interpreter of the child process.
        timeout_s: how long the user's own dataset may take, in seconds.
    """
    if batch.unit == "group":
        return SampleCount(
            None, "The number of groups is unknown, because only the job counts them; give it with --samples."
        )
    name = train.dataset
    dataset = DATASETS.get(name)
    if dataset is not None:
        return _stated_samples(train, dataset) or _count_images(directory / (train.data_dir or ""))
    try:
        samples, classes = count_own_samples(
            name, train.dataset_args, directory=directory, python=python, timeout_s=timeout_s
        )
    except OwnDatasetError as error:
        return _unknown(f"{error.message}, which would end the job too, unless its nodes have what is missing here")
    if train.num_classes is not None or classes is not None:
        return SampleCount(samples, classes=classes or None)
    note = (
        f"The job will fail: train.num_classes is null, and dataset {name} has neither classes nor targets nor labels "
        "to count; write train.num_classes."
    )
    return SampleCount(samples, note)


def count_without_data(train: Train) -> SampleCount | None:
    """Return the number of samples in the training data of a job; None where the data must be read to know it."""
    dataset = DATASETS.get(train.dataset)
    return None if dataset is None else _stated_samples(train, dataset)


def _stated_samples(train: Train, dataset: Dataset) -> SampleCount | None:
    if dataset.samples is not None:
        return SampleCount(dataset.samples[0])
    if "samples" not in dataset.arguments:
        return None
    samples = train.dataset_args.get("samples", dataset.arguments["samples"].default)
    if dataset.arguments["samples"].problem_of(samples) is None:
        return SampleCount(samples)
    return _unknown(f"train.dataset_args.samples is {samples!r}, and not a whole number of 1 or more")


def _count_images(data_dir: Path) -> SampleCount:
    root = data_dir / "train"
    try:
        classes = [entry.path for entry in os.scandir(root) if entry.is_dir()]
    except OSError as error:
        return _unknown(f"{root} cannot be read ({error.strerror})")
    # As torchvision.datasets.folder.make_dataset does: links are followed, suffixes compared in lower case.
    samples = 0
    for folder in classes:
        for _, _, names in os.walk(folder, followlinks=True):
            samples += sum(1 for name in names if name.lower().endswith(IMAGE_EXTENSIONS))
    if samples == 0:
        return _unknown(f"no image lies under {root}/<class>/")
    return SampleCount(samples, classes=len(classes))


def _unknown(why: str) -> SampleCount:
    return SampleCount(None, f"The number of samples is unknown: {why}; give it with --samples.")


# The user's code may print: its standard output becomes standard error, and only the answer goes to the pipe.
_PROGRAM = """
import importlib, json, os, sys
directory, module, function, arguments = sys.argv[1:]
answer = os.dup(1)
os.dup2(2, 1)
sys.path.insert(0, directory)
part = getattr(importlib.import_module(module), function)(split="train", **json.loads(arguments))
found = [getattr(part, name, None) for name in ("classes", "targets", "labels")]
found = [one for one in found if one is not None and not callable(one)]
classes = 0
try:
    if found and found[0] is getattr(part, "classes", None):
        classes = len(found[0])
    elif found:
        classes = int(found[0].max() if hasattr(found[0], "max") else max(found[0])) + 1
except Exception:
    # The task, which reads the data itself, says what is wrong with its labels.
    pass
os.write(answer, f"{len(part)} {max(0, classes)} {int(bool(found))}".encode())
"""


class OwnDatasetError(UserError):
    """The dataset could not be made or has no length."""

    kind = "dataset"


def count_own_samples(
    target: str, arguments: Mapping[str, Any], *, directory: Path, python: str, timeout_s: float
) -> tuple[int, int | None]:
    """Return ``len(function(split="train", **arguments))``, and how many classes the result tells of.

    The classes are None if it tells of none, and 0 if they cannot be counted here.

    Args:
        target: ``pkg.module:function``.
        arguments: ``train.dataset_args``.
        directory: the first directory of the import path, and the child's working directory.
        timeout_s: how long the child may take, in seconds; then its whole session is killed.

    Raises:
        OwnDatasetError: it failed, took too long or has no length.
    """
    module, _, function = target.partition(":")
    command = [python, "-c", _PROGRAM, str(directory), module, function, json.dumps(dict(arguments))]
    try:
        output, errors, code = _run(command, directory, timeout_s)
    except OSError as error:
        raise OwnDatasetError(f"train.dataset {target} could not be made ({error})") from error
    if code is None:
        raise OwnDatasetError(f"train.dataset {target} took longer than {timeout_s:g} s to make")
    numbers = output.split()
    if code != 0 or not numbers or not all(number.isdecimal() for number in numbers):
        reason = errors.strip().rpartition("\n")[2] or f"exit code {code}"
        raise OwnDatasetError(f"train.dataset {target} could not be made ({reason})")
    samples, classes, tells_classes = map(int, numbers)
    return samples, classes if tells_classes else None


def _run(command: list[str], directory: Path, timeout_s: float) -> tuple[str, str, int | None]:
    """Return standard output, standard error and the exit code; None for one that had to be killed."""
    # Its own session, so that loader workers and other children of the user's code can be killed with it.
    with subprocess.Popen(
        command,
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as child:
        try:
            output, errors = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return "", "", None
        finally:
            # At Ctrl-C, communicate waits for a moment, and the child may have ended.
            if child.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
        return output, errors, child.returncode
