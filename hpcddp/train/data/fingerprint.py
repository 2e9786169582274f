"""Fingerprint of the training data, so that a run is not resumed with other data."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from hpcddp.train.data.images import WholeBatches
from hpcddp.train.data.keyed import MapStyle
from hpcddp.train.data.own import known_labels

_MOST_SAMPLES = 64


def fingerprint(name: str, train: MapStyle, classes: int) -> str:
    """Return a hex digest of the training part: its name, size, labels, and part of its content.

    Content is used if reading it twice gives the same: up to 64 evenly spaced samples of a data set in memory, the
    relative paths of an image folder. Samples of the user's own data set are not used, since it may augment at random.
    The location of the data is not used, since it may move.

    Args:
        name: as the job file has it.
        train: the training part.
        classes: K.
    """
    digest = hashlib.sha256(f"{name}\n{len(train)}\n{classes}\n".encode())
    labels = known_labels(train)
    if labels is not None:
        digest.update(tensor_bytes(labels))
    if isinstance(train, WholeBatches):
        stride = max(1, len(train) // _MOST_SAMPLES)
        for tensor in train.__getitems__(range(0, len(train), stride)):
            digest.update(tensor_bytes(tensor))
    for path in _relative_paths(train):
        digest.update(f"{path}\n".encode())
    return digest.hexdigest()


def tensor_bytes(tensor: Tensor) -> bytes:
    """Return a tensor's elements in row-major order, as bytes of this host's order."""
    # A view as bytes works for every dtype, including bfloat16, but needs at least one dimension.
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _relative_paths(train: object) -> list[str]:
    root, samples = getattr(train, "root", None), getattr(train, "samples", None)
    if root is None or not isinstance(samples, list):
        return []
    prefix = f"{Path(root)}/"
    return [str(sample[0]).removeprefix(prefix) for sample in samples if isinstance(sample, tuple)]
