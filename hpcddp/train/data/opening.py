"""Open the data set that ``train.dataset`` names, group its samples, and check that all ranks have the same."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any, Final, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import default_collate

from hpcddp.batch.sampler import GroupTable
from hpcddp.errors import nearest
from hpcddp.jobfile.datasets import DATASETS, is_in_memory
from hpcddp.jobfile.fields import is_reference
from hpcddp.jobfile.sections import Train
from hpcddp.train.data import builtin
from hpcddp.train.data.loader import Data, MapStyle, unchanged
from hpcddp.train.errors import DataError, UserCodeError
from hpcddp.train.user_code import as_user_error, call_function, load_function


def open_data(train: Train) -> Data:
    """Open the data set of a job.

    Args:
        train: the job's training; relative paths are relative to the working directory.

    Raises:
        DataError: the data is missing, damaged, or not what the job says.
        UserCodeError: the user's data set failed.
    """
    to_inputs: Callable[[Tensor], Tensor] = unchanged
    if is_reference(train.dataset):
        both = load_own(train.dataset, train.dataset_args)
    else:
        arguments = _arguments(train)
        both = getattr(builtin, f"load_{train.dataset}")(**arguments)
        if train.dataset == "imagefolder":
            to_inputs = builtin.to_inputs
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


_PAIR: Final = 2  # (tensor, label)


def load_own(name: str, arguments: Mapping[str, Any]) -> tuple[MapStyle, MapStyle]:
    """Return the training and validation part that ``function(split=..., **dataset_args)`` returns.

    Raises:
        UserCodeError: the function cannot be imported, raises, or does not return a map-style data set.
    """
    return _part(name, "train", arguments), _part(name, "val", arguments)


def _part(name: str, split: str, arguments: Mapping[str, Any]) -> MapStyle:
    part = call_function("train.dataset", name, {"split": split, **arguments})
    if not (hasattr(part, "__len__") and hasattr(part, "__getitem__")):
        raise UserCodeError(
            f"train.dataset is {name}, which returned a {type(part).__name__} for split {split}, and that has no "
            "length or no indexing; return a map-style data set, an object with __len__ and __getitem__"
        )
    return cast("MapStyle", part)


def known_labels(part: MapStyle) -> Tensor | None:
    """Return all labels ``[N]`` of a part whose attribute ``targets`` or ``labels`` holds them, or None."""
    for attribute in ("targets", "labels"):
        values = getattr(part, attribute, None)
        if values is None or callable(values):
            continue
        try:
            labels = torch.as_tensor(values)
        except (TypeError, ValueError, RuntimeError):
            continue
        if labels.ndim == 1 and len(labels) == len(part) and not (labels.is_floating_point() or labels.is_complex()):
            return labels.long()
    return None


def count_classes(name: str, parts: Mapping[str, MapStyle], num_classes: int | None) -> int:
    """Return the number of classes K: ``train.num_classes``, or the number that the training part has.

    Args:
        name: ``train.dataset``.
        parts: the parts by split, ``train`` among them.
        num_classes: ``train.num_classes``.

    Raises:
        DataError: K is not known, or a label is not in 0..K-1.
    """
    classes = num_classes or _own_classes(parts["train"])
    if classes is None:
        raise DataError(
            f"train.num_classes is null, and dataset {name} has neither classes nor targets nor labels to count; "
            "write train.num_classes"
        )
    for split, part in parts.items():
        labels = known_labels(part)
        if labels is not None and (int(labels.min()) < 0 or int(labels.max()) >= classes):
            raise DataError(
                f"the model has {classes} classes, 0..{classes - 1}, but split {split} of dataset {name} has "
                f"labels {int(labels.min())}..{int(labels.max())}; write train.num_classes {int(labels.max()) + 1} or "
                "more, with labels from 0 on"
            )
    classes_of_dataset = _own_classes(parts["train"])
    if classes_of_dataset is not None and classes < classes_of_dataset:
        raise DataError(
            f"train.num_classes is {classes}, and dataset {name} has {classes_of_dataset} classes; "
            f"write {classes_of_dataset} or more"
        )
    return classes


def _own_classes(train: MapStyle) -> int | None:
    names = getattr(train, "classes", None)
    if names is not None and hasattr(names, "__len__"):
        return len(names)
    labels = known_labels(train)
    return None if labels is None else int(labels.max()) + 1


def first_samples(data: Data, split: Literal["train", "val"] = "train") -> Tensor:
    """Return the inputs of the first two samples of a split (one sample twice when there is no other).

    Raises:
        UserCodeError: the data set raises, or a sample is not a pair (tensor, int label).
        DataError: a label is not in 0..K-1.
    """
    part = data.train if split == "train" else data.val
    source = f"split {split} of dataset {data.name}"
    first, second = (_checked_input(source, part, index, data.classes) for index in (0, min(1, len(part) - 1)))
    if first.shape != second.shape:
        raise DataError(
            f"{source} gives tensors of different shapes ({tuple(first.shape)}, {tuple(second.shape)}), which make no "
            "batch; give all samples the same shape"
        )
    return data.to_inputs(torch.stack([first, second]))


def _checked_input(source: str, part: MapStyle, index: int, classes: int) -> Tensor:
    with as_user_error(f"{source} failed at sample {index}"):
        sample: Any = part[index]
    is_pair = isinstance(sample, tuple | list) and len(sample) == _PAIR
    if not is_pair or not isinstance(sample[0], Tensor) or not _is_label(sample[1]):
        given = f"({', '.join(type(item).__name__ for item in sample)})" if is_pair else type(sample).__name__
        raise UserCodeError(f"{source} gives {given} at sample {index}; give a pair (tensor, int label)")
    if not 0 <= int(sample[1]) < classes:
        raise DataError(
            f"{source} has label {int(sample[1])} at sample {index}, and the model has {classes} "
            f"classes, 0..{classes - 1}; write a larger train.num_classes, with labels from 0 on"
        )
    return sample[0]


def _is_label(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.ndim == 0 and not (value.is_floating_point() or value.is_complex())
    return isinstance(value, Integral) and not isinstance(value, bool)
