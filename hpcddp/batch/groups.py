"""Groups of samples that stay together, where the batch counts groups: few-shot episodes, sequences of one patient.

A global batch then consists of B groups in the order of the epoch, whose samples follow each other. Groups are
numbered by their first sample, so that the numbers depend only on the data and on the user's function.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np  # noqa: TID253

from hpcddp.batch.order import Indices


class GroupTable:
    """The samples of every group: O(N) integers, the same on every rank.

    Args:
        names: the group of each sample, in the order of the samples; at least one.
    """

    def __init__(self, names: Iterable[int | str]) -> None:
        numbers: dict[int | str, int] = {}
        group_of = np.fromiter((numbers.setdefault(name, len(numbers)) for name in names), dtype=np.int64)
        # A stable sort keeps the samples of a group in their own order.
        self._members: Indices = np.argsort(group_of, kind="stable").astype(np.int64)
        self._sizes: Indices = np.bincount(group_of).astype(np.int64)
        self._starts: Indices = np.cumsum(self._sizes) - self._sizes
        self.digest = hashlib.sha256(group_of.astype("<i8").tobytes()).hexdigest()

    def __len__(self) -> int:
        """Return how many groups there are."""
        return len(self._sizes)

    @property
    def smallest(self) -> int:
        """Samples of the smallest group."""
        return int(self._sizes.min())

    @property
    def largest(self) -> int:
        """Samples of the largest group."""
        return int(self._sizes.max())

    def samples(self, groups: Indices) -> Indices:
        """Return the sample indices of some groups, one group after the other.

        Args:
            groups: numbers of groups, ``[g]``, 0..len-1.
        """
        parts = [self._members[start : start + size] for start, size in zip(*self._spans(groups), strict=True)]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def count(self, groups: Indices) -> int:
        """Return how many samples some groups have together."""
        return int(self._sizes[groups].sum())

    def _spans(self, groups: Indices) -> tuple[list[int], list[int]]:
        return self._starts[groups].tolist(), self._sizes[groups].tolist()
