"""Open the data set that ``train.dataset`` names; ``digits`` and ``synthetic``, which need no files, are made here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpcddp.batch.samples import SYNTHETIC_DEFAULTS
from hpcddp.jobfile.sections import Train
from hpcddp.packages import require_folder
from hpcddp.train.data.cifar10 import load_cifar10
from hpcddp.train.data.identity import fingerprint
from hpcddp.train.data.imagefolder import load_imagefolder
from hpcddp.train.data.own import count_classes, load_own
from hpcddp.train.data.parts import Data, MemoryImages, MicroBatch, WholeBatches, refuse_unknown, take_size
from hpcddp.train.errors import DataError
from hpcddp.train.randomness import GOLDEN, mix
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
    # Below environment.stage.target, which may begin with a variable of the node.
    path = Path(os.path.expandvars(train.data_dir))
    if not path.is_dir():
        problem = "is not a folder" if path.exists() else "does not exist on this host"
        raise DataError(f"train.data_dir is {path}, which {problem}; write a folder that every node sees")
    return path


_EDGE = 8
_SCALE = 4  # 8 x 8 pixels become 32 x 32
_LEVELS = 16
# Of the training part.
_MEAN, _STD = 0.3052, 0.3763
_VALIDATION_STRIDE = 5


def load_digits() -> tuple[MemoryImages, MemoryImages]:
    """Return the training part (1,437 images) and the validation part (every fifth image, 360), as 3 x 32 x 32."""
    folder = require_folder("train.dataset: digits", "sklearn")
    # The import of scikit-learn, whose load_digits reads the same file, takes half as long as that of torch.
    table = torch.from_numpy(np.loadtxt(folder / "datasets" / "data" / "digits.csv.gz", delimiter=","))
    small = table[:, :-1].reshape(-1, _EDGE, _EDGE).to(torch.uint8)
    labels = table[:, -1].long()
    # Repeating pixels is exact, so every host has the same bytes.
    large = small.repeat_interleave(_SCALE, dim=1).repeat_interleave(_SCALE, dim=2)
    pixels = large.unsqueeze(1).expand(-1, 3, -1, -1).contiguous()
    held_out = torch.arange(len(labels)) % _VALIDATION_STRIDE == 0
    return _part(pixels[~held_out], labels[~held_out]), _part(pixels[held_out], labels[held_out])


def _part(pixels: torch.Tensor, labels: torch.Tensor) -> MemoryImages:
    return MemoryImages(
        pixels, labels, classes=[str(digit) for digit in range(10)], levels=_LEVELS, mean=[_MEAN] * 3, std=[_STD] * 3
    )


# Images are windows into one strip of noise, with this many different offsets.
_OFFSETS = 1 << 16
_SEED = 20_240_229


class SyntheticImages(WholeBatches):
    """Noise images whose content and label are functions of the index; memory does not grow with their number.

    Args:
        samples: N >= 1.
        image_size: height and width.
        classes: K >= 1.
        first: the index of the first sample, which makes parts differ.
    """

    def __init__(self, samples: int, *, image_size: int, classes: int, first: int = 0) -> None:
        self.classes = range(classes)
        self._samples, self._size, self._first = samples, image_size, first
        generator = torch.Generator().manual_seed(_SEED)
        self._strip = torch.randn(3 * image_size * image_size + _OFFSETS, generator=generator)

    def __len__(self) -> int:
        return self._samples

    def __getitems__(self, indices: Sequence[int]) -> MicroBatch:
        """Return images ``[n, 3, image_size, image_size]``, float32, and labels ``[n]``."""
        words = mix((np.asarray(indices, dtype=np.uint64) + np.uint64(self._first)) * GOLDEN)
        pixels = 3 * self._size * self._size
        images = [self._strip[start : start + pixels] for start in (words % np.uint64(_OFFSETS)).tolist()]
        labels = (words >> np.uint64(32)) % np.uint64(len(self.classes))
        return torch.stack(images).view(-1, 3, self._size, self._size), torch.from_numpy(labels.astype(np.int64))
