"""Open the data set that ``train.dataset`` names, group its samples, and check that all ranks have the same."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator
from dataclasses import replace
from importlib import import_module
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import default_collate

from hpcddp.batch.sampler import GroupTable
from hpcddp.errors import nearest
from hpcddp.jobfile.datasets import DATASETS, is_in_memory
from hpcddp.jobfile.fields import is_reference
from hpcddp.jobfile.sections import Train
from hpcddp.train.data.own import count_classes, known_labels, load_own
from hpcddp.train.data.parts import Data, MapStyle, unchanged
from hpcddp.train.errors import DataError, UserCodeError
from hpcddp.train.user_code import as_user_error, load_function


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


_MOST_SAMPLES = 64


def fingerprint(name: str, train: MapStyle, classes: int) -> str:
    """Return a hex digest of the training part: its name, size, labels, and part of its content.

    Content is used if reading it twice gives the same: up to 64 evenly spaced samples of a built-in data set in
    memory, the
    relative paths of an image folder. Samples of the user's own data set are not used, since it may augment at random.
    The location of the data is not used, since it may move.

    Args:
        name: as the job file has it.
    """
    digest = hashlib.sha256(f"{name}\n{len(train)}\n{classes}\n".encode())
    labels = known_labels(train)
    if labels is not None:
        digest.update(tensor_bytes(labels))
    if is_in_memory(name):
        stride = max(1, len(train) // _MOST_SAMPLES)
        for tensor in default_collate([train[index] for index in range(0, len(train), stride)]):
            digest.update(tensor_bytes(tensor))
    for path in _relative_paths(train):
        digest.update(f"{path}\n".encode())
    return digest.hexdigest()


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's elements in row-major order, as bytes of this host's order; not a copy where possible."""
    # A view as bytes works for every dtype, including bfloat16, but needs at least one dimension.
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _relative_paths(train: object) -> list[str]:
    root = getattr(train, "root", None)
    samples = getattr(train, "samples", None)
    if root is None or not isinstance(samples, list):
        return []
    prefix = f"{Path(root)}/"
    return [str(sample[0]).removeprefix(prefix) for sample in samples if isinstance(sample, tuple)]


_DIGITS = 15  # hex digits of the fingerprint, 60 bits, which fit into an int64


def refuse_other_data(data: Data, *, rank: int, world_size: int, device: torch.device) -> None:
    """Refuse a training whose ranks have opened different data; a collective.

    With different sizes, the ranks would make different numbers of steps and mix up their collectives. With different
    samples, the global batch would not be defined.

    Args:
        data: the data set as this rank has opened it.
        device: device of the collective.

    Raises:
        DataError: the data of some rank differs from rank 0's; raised on all ranks.
    """
    rows = torch.zeros(world_size, 3, dtype=torch.int64)
    rows[rank] = torch.tensor([len(data.train), len(data.val), int(data.fingerprint[:_DIGITS] or "0", 16)])
    seen = rows.to(device)
    # Each rank fills its own row only, so the sum gathers the rows.
    dist.all_reduce(seen)
    first, *others = seen.tolist()
    for other_rank, other in enumerate(others, start=1):
        if other != first:
            raise DataError(
                f"dataset {data.name} is another one on rank {other_rank} than on rank 0: {_describe(other)}, and "
                f"{_describe(first)}; let every host see the same files, and give what is drawn at random a fixed seed"
            )


def _describe(seen: list[int]) -> str:
    train, val, digest = seen
    return f"{train:,} training and {val:,} validation samples (fingerprint {digest:0{_DIGITS}x})"


_DIGEST_BYTES = 32


def with_groups(data: Data, function: str, device: torch.device) -> Data:
    """Return the data with grouped training samples, the same groups on every rank.

    Every rank calls the user's function for every sample and keeps the N results, so that each rank knows the samples
    of all others. A collective compares the results.

    Args:
        function: ``batch.group``, ``pkg.module:function``: takes the index of a training sample, returns its group.
        device: this rank's device; the default process group is open.

    Raises:
        UserCodeError: the function cannot be imported, raises, or returns neither an int nor a str.
        DataError: the groups are not the same on every rank.
    """
    groups = GroupTable(_names(function, len(data.train)))
    _refuse_other_groups(function, groups, device)
    fingerprint = hashlib.sha256(f"{data.fingerprint}\n{groups.digest}".encode()).hexdigest()
    return replace(data, groups=groups, fingerprint=fingerprint)


def _names(name: str, samples: int) -> Iterator[int | str]:
    function = load_function("batch.group", name)
    for index in range(samples):
        with as_user_error(f"batch.group is {name}, which failed at sample {index}"):
            group = function(index)
        if isinstance(group, bool) or not isinstance(group, Integral | str):
            raise UserCodeError(
                f"batch.group is {name}, which returned a {type(group).__name__} for sample {index}; return the "
                "group's number or its name, an int or a str"
            )
        yield group if isinstance(group, str) else int(group)


def _refuse_other_groups(function: str, groups: GroupTable, device: torch.device) -> None:
    mine = torch.frombuffer(bytearray.fromhex(groups.digest), dtype=torch.uint8).to(device)
    all_digests = torch.empty(dist.get_world_size(), _DIGEST_BYTES, dtype=torch.uint8, device=device)
    dist.all_gather(list(all_digests), mine)
    other = [rank for rank, digest in enumerate(all_digests) if not torch.equal(digest, all_digests[0])]
    if other:
        raise DataError(
            f"batch.group is {function}, which gives other groups on rank {other[0]} than on rank 0, so that the ranks "
            "would train on samples twice or never; let it depend on the index and the data alone (hash() of a text "
            "differs from process to process)"
        )
