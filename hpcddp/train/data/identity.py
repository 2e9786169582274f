"""The identity of the training data: its fingerprint, and the check that all ranks have opened the same data."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import default_collate

from hpcddp.jobfile.datasets import is_in_memory
from hpcddp.train.data.own import known_labels
from hpcddp.train.data.parts import Data, MapStyle
from hpcddp.train.errors import DataError

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
