"""Open the data set that ``train.dataset`` names."""

from __future__ import annotations

import os
from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from typing import Any

from hpcddp.errors import nearest
from hpcddp.jobfile.datasets import DATASETS
from hpcddp.jobfile.fields import is_reference
from hpcddp.jobfile.sections import Train
from hpcddp.train.data.identity import fingerprint
from hpcddp.train.data.own import count_classes, load_own
from hpcddp.train.data.parts import Data, unchanged
from hpcddp.train.errors import DataError


def open_data(train: Train) -> Data:
    """Open the data set of a job.

    Args:
        train: the job's training; relative paths are relative to the working directory.

    Raises:
        DataError: the data is missing, damaged, or not what the job says.
        UserCodeError: the user's data set failed.
    """
    to_inputs = unchanged
    if is_reference(train.dataset):
        both = load_own(train.dataset, train.dataset_args)
    else:
        arguments = _arguments(train)
        module = import_module(f"hpcddp.train.data.{train.dataset}")
        both = module.load(**arguments)
        to_inputs = getattr(module, "to_inputs", unchanged)
    parts = dict(zip(("train", "val"), both, strict=True))
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
        to_inputs=to_inputs,
    )


def _arguments(train: Train) -> dict[str, Any]:
    """Return the arguments of ``load`` of a built-in data set: as they are given, else the defaults.

    Raises:
        DataError: the data set or an argument is unknown, a value is of another type, or the folder is missing.
    """
    dataset = DATASETS.get(train.dataset)
    if dataset is None:
        raise DataError(
            f"train.dataset is {train.dataset}, which is no data set of hpcddp; write {', '.join(DATASETS)} or "
            "pkg.module:function"
        )
    values: dict[str, Any] = {name: argument.default for name, argument in dataset.arguments.items()}
    for name, value in train.dataset_args.items():
        if name not in values:
            raise _unknown_argument(train.dataset, name, values)
        problem = dataset.arguments[name].problem_of(value)
        if problem is not None:
            raise DataError(f"train.dataset_args.{name} is {value!r}, which {problem}")
        values[name] = value
    if dataset.is_in_files:
        values["data_dir"] = _data_dir(train)
    return values


def _unknown_argument(dataset: str, name: str, known: Collection[str]) -> DataError:
    near = nearest(name, known)
    if near is not None:
        advice = f"did you mean {near}"
    elif known:
        advice = f"write one of {', '.join(known)}"
    else:
        advice = "leave it out"
    return DataError(f"train.dataset_args.{name} is given, but dataset {dataset} has no such argument; {advice}")


def _data_dir(train: Train) -> Path:
    if train.data_dir is None:
        raise DataError(f"train.data_dir is null, and dataset {train.dataset} is read from files; write their folder")
    # Below environment.stage.target, which may begin with a variable of the node.
    path = Path(os.path.expandvars(train.data_dir))
    if not path.is_dir():
        problem = "is not a folder" if path.exists() else "does not exist on this host"
        raise DataError(f"train.data_dir is {path}, which {problem}; write a folder that every node sees")
    return path
