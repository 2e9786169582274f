"""The built-in data sets: a row for each, and ``load`` of the module ``hpcddp.train.data.NAME``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """An argument in ``train.dataset_args``: true or false, or a whole number of 1 or more.

    Args:
        default: None: a number that follows from the other arguments.
        note: what the page of the job file says about it besides its default.
    """

    default: bool | int | None = None
    note: str | None = None

    def __str__(self) -> str:
        default = None if self.default is None else json.dumps(self.default)
        return "; ".join(part for part in (default, self.note) if part is not None)

    def problem_of(self, value: object) -> str | None:
        """Return what is wrong with a value, and what to write instead; None if the argument takes it."""
        if value is None and self.default is None:
            return None
        if isinstance(self.default, bool):
            return None if isinstance(value, bool) else "is neither true nor false; write one of them"
        is_size = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        return None if is_size else "is no whole number from 1 on; write one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """A built-in data set.

    Args:
        arguments: by name; ``load`` has a parameter for each.
        classes: None: the arguments or the data say how many there are.
        samples: of the training part and of the validation part; None: the argument ``samples`` is the number, or the
            images in the folders ``train/CLASS`` are counted.
        is_in_files: whether it is read from ``train.data_dir``, which ``load`` then gets too.
        packages: what must be installed besides torch and numpy, by the names under which Python imports it.
    """

    arguments: Mapping[str, Argument] = field(default_factory=dict)
    classes: int | None = None
    samples: tuple[int, int] | None = None
    is_in_files: bool = False
    packages: tuple[str, ...] = ()


DATASETS: Final[Mapping[str, Dataset]] = MappingProxyType(
    {
        # scikit-learn's digits: 1,797 images, of which every fifth is for validation.
        "digits": Dataset(classes=10, samples=(1437, 360), packages=("sklearn",)),
        "cifar10": Dataset(
            arguments={"augment": Argument(default=True, note="never of the validation part")},
            classes=10,
            samples=(50_000, 10_000),
            is_in_files=True,
            packages=("torchvision",),
        ),
        "imagefolder": Dataset(
            arguments={
                "augment": Argument(default=True),
                "image_size": Argument(default=224),
                "resize": Argument(note="before crops in the centre: 256/224 of it"),
            },
            is_in_files=True,
            packages=("torchvision",),
        ),
        "synthetic": Dataset(
            arguments={
                "samples": Argument(default=1024),
                "val_samples": Argument(default=256),
                "image_size": Argument(default=32),
                "num_classes": Argument(default=10),
            }
        ),
    }
)


def is_in_memory(name: str) -> bool:
    """Return whether this is a built-in data set whose samples are made from memory."""
    return name in DATASETS and not DATASETS[name].is_in_files


def describe_arguments() -> str:
    """Return the arguments of the data sets that have some, a sentence for each."""
    sentences = []
    for name, dataset in DATASETS.items():
        arguments = [f"`{argument}` ({facts})" for argument, facts in dataset.arguments.items()]
        if arguments:
            sentences.append(f"`{name}`: {', '.join(arguments)}.")
    return " ".join(sentences)
