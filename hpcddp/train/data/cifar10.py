"""CIFAR-10 from local files, in the Python or the binary version."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from hpcddp.train.data.parts import MemoryImages
from hpcddp.train.errors import DataError

_CLASSES: Final = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
# Of the training part, per channel.
_MEAN: Final = (0.4914, 0.4822, 0.4465)
_STD: Final = (0.2470, 0.2435, 0.2616)
_PIXELS: Final = 3 * 32 * 32
_CROP_PADDING: Final = 4
_TRAIN: Final = tuple(f"data_batch_{number}" for number in range(1, 6))
_TEST: Final = ("test_batch",)


def load(*, data_dir: Path, augment: bool) -> tuple[MemoryImages, MemoryImages]:
    """Return the training part (50,000 images) and the test part (10,000), as 3 x 32 x 32.

    Args:
        data_dir: ``cifar-10-batches-py``, ``cifar-10-batches-bin``, or a folder that holds one of them.
        augment: whether training images are cropped and flipped at random.

    Raises:
        DataError: there are no such files, or they hold something else.
    """
    folder = _find(data_dir)
    return _part(folder, _TRAIN, _CROP_PADDING if augment else None), _part(folder, _TEST, None)


def _find(data_dir: Path) -> Path:
    for folder in (data_dir, data_dir / "cifar-10-batches-py", data_dir / "cifar-10-batches-bin"):
        if (folder / "test_batch").is_file() or (folder / "test_batch.bin").is_file():
            return folder
    raise DataError(
        f"train.data_dir is {data_dir}, which holds no CIFAR-10: neither cifar-10-batches-py nor cifar-10-batches-bin "
        "nor their files; unpack cifar-10-python.tar.gz or cifar-10-binary.tar.gz there"
    )


def _part(folder: Path, names: tuple[str, ...], crop_padding: int | None) -> MemoryImages:
    read = _read_pickled if (folder / names[0]).is_file() else _read_binary
    parts = [read(folder, name) for name in names]
    pixels, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return MemoryImages(pixels, labels, classes=_CLASSES, levels=255, mean=_MEAN, std=_STD, crop_padding=crop_padding)


def _read_binary(folder: Path, name: str) -> tuple[Tensor, Tensor]:
    """Read records of one label byte and 3,072 pixel bytes (channels, rows, columns)."""
    path = folder / f"{name}.bin"
    content = np.frombuffer(_read(path), dtype=np.uint8)
    if content.size == 0 or content.size % (1 + _PIXELS):
        raise DataError(
            f"{path} has {content.size} bytes, no multiple of the {1 + _PIXELS} of a record; unpack it again"
        )
    records = content.reshape(-1, 1 + _PIXELS)
    return _checked(path, records[:, 1:], records[:, 0])


def _read_pickled(folder: Path, name: str) -> tuple[Tensor, Tensor]:
    path = folder / name
    try:
        content = _ArraysOnly(io.BytesIO(_read(path)), encoding="bytes").load()
        pixels, labels = (np.asarray(_value(content, name)) for name in ("data", "labels"))
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, IndexError) as error:
        raise DataError(f"{path} is no CIFAR-10 batch ({error}); unpack it again") from error
    return _checked(path, pixels, labels)


def _value(content: Mapping[Any, Any], name: str) -> object:
    """Return an entry by its name, which files written by Python 2 hold as bytes and those by Python 3 as text."""
    return content[name if name in content else name.encode()]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); unpack CIFAR-10 again") from error


def _checked(path: Path, pixels: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> tuple[Tensor, Tensor]:
    fits = pixels.shape == (len(labels), _PIXELS) and pixels.dtype == np.uint8 and labels.ndim == 1
    if not fits or not np.issubdtype(labels.dtype, np.integer) or labels.min() < 0 or labels.max() >= len(_CLASSES):
        raise DataError(
            f"{path} holds {pixels.dtype} data of shape {pixels.shape} with {labels.size} labels, and CIFAR-10 has "
            f"uint8 data of shape (n, {_PIXELS}) with n labels 0..9; unpack it again"
        )
    images = torch.from_numpy(pixels.copy()).view(-1, 3, 32, 32)
    return images, torch.from_numpy(labels.astype(np.int64))


class _ArraysOnly(pickle.Unpickler):
    """An unpickler for arrays of numbers: any other object in the file could run code."""

    _ALLOWED: Final = frozenset(
        {
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
            # Used by numpy from pickle protocol 5 on.
            ("numpy.core.numeric", "_frombuffer"),
            ("numpy._core.numeric", "_frombuffer"),
            ("numpy.core.multiarray", "scalar"),
            ("numpy._core.multiarray", "scalar"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("_codecs", "encode"),
        }
    )

    def find_class(self, module: str, name: str) -> object:
        """Return an allowed class; refuse every other."""
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, and only arrays are admitted")
        # numpy 2 moved these names, and the old module warns there. numpy 1.26 has only a part of the new one.
        old = "numpy.core."
        new = "numpy._core."
        is_new = np.lib.NumpyVersion(np.__version__) >= "2.0.0"
        module = module.replace(old, new) if is_new else module.replace(new, old)
        return super().find_class(module, name)
