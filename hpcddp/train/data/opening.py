"""Open the data set that ``train.dataset`` names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from hpcddp.jobfile.datasets import DATASETS, Argument
from hpcddp.jobfile.fields import is_reference
from hpcddp.jobfile.sections import Train
from hpcddp.train.data.identity import fingerprint
from hpcddp.train.data.own import count_classes, load_own
from hpcddp.train.data.parts import Data, refuse_unknown
from hpcddp.train.errors import DataError


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
    if is_reference(train.dataset):
        return load_own(train.dataset, train.dataset_args)
    dataset = DATASETS.get(train.dataset)
    if dataset is None:
        raise DataError(
            f"train.dataset is {train.dataset}, which is no data set of hpcddp; write {', '.join(DATASETS)} or "
            "pkg.module:function"
        )
    values = _argument_values(train, dataset.arguments)
    if dataset.is_in_files:
        values["data_dir"] = _data_dir(train)
    parts: tuple[Any, Any] = import_module(f"hpcddp.train.data.{train.dataset}").load(**values)
    return parts


def _argument_values(train: Train, arguments: Mapping[str, Argument]) -> dict[str, Any]:
    """Return the value of each argument, as it is given or its default.

    Raises:
        DataError: an argument is unknown, or its value is of another type.
    """
    refuse_unknown(train.dataset, train.dataset_args, tuple(arguments))
    values: dict[str, Any] = {name: argument.default for name, argument in arguments.items()}
    for name, value in train.dataset_args.items():
        problem = arguments[name].problem_of(value)
        if problem is not None:
            raise DataError(f"train.dataset_args.{name} is {value!r}, which {problem}")
        values[name] = value
    return values


def _data_dir(train: Train) -> Path:
    if train.data_dir is None:
        raise DataError(f"train.data_dir is null, and dataset {train.dataset} is read from files; write their folder")
    # Below environment.stage.target, which may begin with a variable of the node.
    path = Path(os.path.expandvars(train.data_dir))
    if not path.is_dir():
        problem = "is not a folder" if path.exists() else "does not exist on this host"
        raise DataError(f"train.data_dir is {path}, which {problem}; write a folder that every node sees")
    return path
