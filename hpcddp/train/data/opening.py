"""Open the data set that ``train.dataset`` names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcddp.batch.samples import SYNTHETIC_DEFAULTS
from hpcddp.jobfile.sections import Train
from hpcddp.train.data.arguments import refuse_unknown, take_size
from hpcddp.train.data.cifar10 import load_cifar10
from hpcddp.train.data.digits import load_digits
from hpcddp.train.data.fingerprint import fingerprint
from hpcddp.train.data.imagefolder import load_imagefolder
from hpcddp.train.data.images import Data
from hpcddp.train.data.own import count_classes, load_own
from hpcddp.train.data.synthetic import SyntheticImages
from hpcddp.train.errors import DataError
from hpcddp.train.user_code import is_own


def open_data(train: Train) -> Data:
    """Open the data set of a job.

    Args:
        train: the job's training; relative paths are relative to the working directory.

    Raises:
        DataError: the data is missing, damaged, or not what the job says.
        UserCodeError: the user's data set failed.
    """
    parts = dict(zip(("train", "val"), _open_parts(train), strict=True))
    for split, part in parts.items():
        if len(part) == 0:
            raise DataError(f"dataset {train.dataset} has no samples in split {split}; give it some")
    classes = count_classes(train.dataset, parts, train.num_classes)
    return Data(
        name=train.dataset,
        train=parts["train"],
        val=parts["val"],
        classes=classes,
        fingerprint=fingerprint(train.dataset, parts["train"], classes),
    )


def _open_parts(train: Train) -> tuple[Any, Any]:
    arguments = dict(train.dataset_args)
    if is_own(train.dataset):
        return load_own(train.dataset, arguments)
    if train.dataset == "synthetic":
        return _synthetic(arguments)
    if train.dataset == "imagefolder":
        return load_imagefolder(_data_dir(train), arguments)
    if train.dataset == "cifar10":
        return load_cifar10(_data_dir(train), arguments)
    refuse_unknown(train.dataset, arguments, ())
    if train.dataset == "digits":
        return load_digits()
    raise DataError(
        f"train.dataset is {train.dataset}, which is no data set of hpcddp; write digits, cifar10, imagefolder, "
        "synthetic or pkg.module:function"
    )


def _synthetic(arguments: dict[str, Any]) -> tuple[SyntheticImages, SyntheticImages]:
    refuse_unknown("synthetic", arguments, tuple(SYNTHETIC_DEFAULTS))
    sizes = {name: take_size(arguments, name, default) for name, default in SYNTHETIC_DEFAULTS.items()}
    train = SyntheticImages(sizes["samples"], image_size=sizes["image_size"], classes=sizes["num_classes"])
    val = SyntheticImages(
        sizes["val_samples"], image_size=sizes["image_size"], classes=sizes["num_classes"], first=sizes["samples"]
    )
    return train, val


def _data_dir(train: Train) -> Path:
    if train.data_dir is None:
        raise DataError(f"train.data_dir is null, and dataset {train.dataset} is read from files; write their folder")
    path = Path(train.data_dir)
    if not path.is_dir():
        found = "is not a folder" if path.exists() else "does not exist on this host"
        raise DataError(f"train.data_dir is {path}, which {found}; write a folder that every node sees")
    return path
