"""Load the user's own data set, and check classes, labels and first samples of any data set."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any, Final, Literal, cast

import torch
from torch import Tensor

from hpcddp.train.data.parts import Data, MapStyle
from hpcddp.train.errors import DataError, UserCodeError
from hpcddp.train.user_code import as_user_error, call_function

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
