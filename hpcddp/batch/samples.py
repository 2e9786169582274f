"""How many samples the training data has, as far as that can be known without torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hpcddp.batch.own_dataset import OwnDatasetError, count_own_groups, count_own_samples
from hpcddp.spec.job import Batch, Train

# scikit-learn's digits: 1,797 images, of which every fifth is for validation.
TRAINING_SAMPLES: Mapping[str, int] = MappingProxyType({"digits": 1437, "cifar10": 50_000})
VALIDATION_SAMPLES: Mapping[str, int] = MappingProxyType({"digits": 360, "cifar10": 10_000})

# The synthetic dataset takes each of these by name from `train.dataset_args`.
SYNTHETIC_DEFAULTS: Mapping[str, int] = MappingProxyType(
    {"samples": 1024, "val_samples": 256, "image_size": 32, "num_classes": 10}
)

TABLED_DATASETS = frozenset({*TRAINING_SAMPLES, "synthetic"})
"""Datasets whose size is known without looking at anything."""

# torchvision.datasets.folder.IMG_EXTENSIONS; a test compares the two.
IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


@dataclass(frozen=True, slots=True)
class SampleCount:
    """How many samples the training data has, or groups of samples.

    Args:
        samples: N; None when it cannot be known here.
        note: why it cannot be known, and what to do; None when it is.
        smallest_group: samples of the smallest group; None where samples are counted, or it cannot be known.
    """

    samples: int | None
    note: str | None = None
    smallest_group: int | None = None


def count_units(train: Train, batch: Batch, *, directory: Path, python: str, timeout_s: float = 60.0) -> SampleCount:
    """Return how many of what the batch counts the training data has: samples, or groups.

    Groups are named by the user's function, which is called for every sample in a child process.

    Args:
        train: the job's ``train`` section.
        batch: the job's ``batch`` section.
        directory: the directory of submission, which relative paths and imports start from.
        python: the interpreter of the child process.
        timeout_s: how long each child may take, in seconds.
    """
    count = count_samples(train, directory=directory, python=python, timeout_s=timeout_s)
    if batch.unit == "sample" or batch.group is None:
        return count
    if count.samples is None:
        return SampleCount(None, (count.note or "").replace("samples", "groups", 1))
    try:
        groups, smallest = count_own_groups(
            batch.group, count.samples, directory=directory, python=python, timeout_s=timeout_s
        )
    except OwnDatasetError as error:
        return _unknown(error.message, "group")
    return SampleCount(groups, smallest_group=smallest)


def count_samples(train: Train, *, directory: Path, python: str, timeout_s: float = 60.0) -> SampleCount:
    """Return how many samples the job's training data has.

    The built-in datasets are looked up, an image folder is counted on disk as torchvision would, and one's own dataset
    is made and measured in a child process.

    Args:
        train: the job's ``train`` section.
        directory: the directory of submission, which relative paths and imports start from.
        python: the interpreter of the child process.
        timeout_s: how long one's own dataset may take, in seconds.
    """
    name = train.dataset
    if name in TRAINING_SAMPLES:
        return SampleCount(TRAINING_SAMPLES[name])
    if name == "synthetic":
        return _count_synthetic(train.dataset_args)
    if name == "imagefolder":
        return _count_images(directory / (train.data_dir or ""))
    try:
        arguments = dict(train.dataset_args)
        return SampleCount(count_own_samples(name, arguments, directory=directory, python=python, timeout_s=timeout_s))
    except OwnDatasetError as error:
        return _unknown(error.message)


def _count_synthetic(arguments: Mapping[str, Any]) -> SampleCount:
    samples = arguments.get("samples", SYNTHETIC_DEFAULTS["samples"])
    if isinstance(samples, int) and not isinstance(samples, bool) and samples >= 1:
        return SampleCount(samples)
    return _unknown(f"train.dataset_args.samples is {samples!r}, and not a whole number of 1 or more")


def _count_images(data_dir: Path) -> SampleCount:
    root = data_dir / "train"
    try:
        classes = [entry.path for entry in os.scandir(root) if entry.is_dir()]
    except OSError as error:
        return _unknown(f"{root} cannot be read ({error.strerror})")
    # As torchvision.datasets.folder.make_dataset does: links are followed, suffixes compared in lower case.
    walks = (os.walk(folder, followlinks=True) for folder in classes)
    samples = sum(name.lower().endswith(IMAGE_EXTENSIONS) for walk in walks for _, _, names in walk for name in names)
    if samples:
        return SampleCount(samples)
    return _unknown(f"no image lies under {root}/<class>/")


def _unknown(why: str, unit: str = "sample") -> SampleCount:
    return SampleCount(None, f"The number of {unit}s is unknown: {why}; give it with --samples.")
