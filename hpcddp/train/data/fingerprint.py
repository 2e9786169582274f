"""What tells one training set from another, so that a run never goes on with other data unawares."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpcddp.train.data.images import WholeBatches
from hpcddp.train.data.own import known_labels

_LOOKED_AT = 64


def fingerprint(name: str, train: Any, classes: int) -> str:  # noqa: ANN401
    """Return a hex digest of the training part: its name, size, labels, and what of its content is cheap and fixed.

    The content counts where reading it twice gives the same: up to 64 evenly spaced samples of a data set in memory,
    the relative paths of an image folder. A data set of the user's own may augment at random, so its samples do not.
    Where the data lies does not count: it may move.

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
        stride = max(1, len(train) // _LOOKED_AT)
        for tensor in train.__getitems__(range(0, len(train), stride)):
            digest.update(tensor_bytes(tensor))
    for path in _relative_paths(train):
        digest.update(f"{path}\n".encode())
    return digest.hexdigest()


def tensor_bytes(tensor: Tensor) -> bytes:
    """Return a tensor's elements in row-major order, as bytes of this host's order."""
    # Viewing as bytes works for every number format, bfloat16 included; a single number has no dimension to view.
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _relative_paths(train: Any) -> list[str]:  # noqa: ANN401
    root, samples = getattr(train, "root", None), getattr(train, "samples", None)
    if root is None or not isinstance(samples, list):
        return []
    prefix = f"{Path(root)}/"
    return [str(sample[0]).removeprefix(prefix) for sample in samples if isinstance(sample, tuple)]
