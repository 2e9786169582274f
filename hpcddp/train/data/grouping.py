"""Group the training samples by the user's function ``batch.group``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from numbers import Integral

import torch
import torch.distributed as dist

from hpcddp.batch.sampler import GroupTable
from hpcddp.train.data.parts import Data
from hpcddp.train.errors import DataError, UserCodeError
from hpcddp.train.user_code import as_user_error, load_function

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
