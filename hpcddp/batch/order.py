"""The order of an epoch: a keyed permutation that is evaluated per position (batch contract, section 1).

``KeyedOrder`` uses integer arithmetic on 64-bit words and two hashes with published test vectors, so that an order is
the same on every platform and for every version of numpy: nothing is drawn from a random generator of numpy's.
"""

from __future__ import annotations

import hashlib
import math
from typing import Protocol, TypeAlias

import numpy as np  # noqa: TID253  this module is imported late
from numpy.typing import NDArray  # noqa: TID253  as above

Indices: TypeAlias = NDArray[np.int64]
_Words: TypeAlias = NDArray[np.uint64]

# A part of every key: another number changes all orders, and is a new contract.
CONTRACT_VERSION = 1
# Orders of up to this many samples are shuffled: over few values a Feistel network does not reach all orders equally
# often. The limit is a part of the contract as well.
SHUFFLE_LIMIT = 4096
_ROUNDS = 8


class SampleOrder(Protocol):
    """The order of one epoch: a permutation of 0..samples-1."""

    def __call__(self, positions: Indices) -> Indices:
        """Return the sample index at each position; positions are 0..samples-1, any shape."""
        ...


class KeyedOrder:
    """A permutation of 0..samples-1 whose key is a hash of (contract version, seed, epoch, samples).

    Up to ``SHUFFLE_LIMIT`` samples the order is a shuffle: the indices sorted by one 64-bit word each, from SHAKE-256.
    Above, each position goes through a Feistel network: no list is needed, and an epoch can start at any position.

    Args:
        samples: N, 1..2^62.
        seed: the root seed; any integer.
        epoch: zero-based.
    """

    def __init__(self, samples: int, seed: int, epoch: int) -> None:
        if not 1 <= samples <= 1 << 62:
            raise ValueError(f"an order has 1..2^62 samples, not {samples}")
        self.samples = samples
        key = f"hpcddp order {CONTRACT_VERSION}: seed {seed}, epoch {epoch}, samples {samples}".encode()
        self._permute = _Shuffle(samples, key) if samples <= SHUFFLE_LIMIT else _Feistel(samples, key)

    def __call__(self, positions: Indices) -> Indices:
        """Return the sample index at each position; positions are 0..samples-1, any shape."""
        _check_range(positions, self.samples)
        return self._permute(positions.astype(np.uint64)).astype(np.int64)


class TorchOrder:
    """The order of ``torch.randperm`` with a generator seeded ``seed + epoch``, to match existing runs.

    It needs torch, and memory for N numbers.

    Args:
        samples: N >= 1.
        epoch: zero-based.
    """

    def __init__(self, samples: int, seed: int, epoch: int) -> None:
        import torch

        generator = torch.Generator().manual_seed(seed + epoch)
        self.samples = samples
        self._order: Indices = torch.randperm(samples, generator=generator).numpy()

    def __call__(self, positions: Indices) -> Indices:
        """Return the sample index at each position; positions are 0..samples-1, any shape."""
        _check_range(positions, self.samples)
        return self._order[positions]


class _Shuffle:
    """All orders equally likely over keys: indices sorted by independent words (equal words: chance below 2^-40)."""

    def __init__(self, samples: int, key: bytes) -> None:
        words = np.frombuffer(hashlib.shake_256(key).digest(8 * samples), dtype="<u8")
        self._order: _Words = np.argsort(words, kind="stable").astype(np.uint64)

    def __call__(self, positions: _Words) -> _Words:
        return self._order[positions.astype(np.intp)]


class _Feistel:
    """A Feistel network over pairs (left, right) of Z_a x Z_b with a*b just above N, and cycle walking.

    The two halves take turns: ``left = (left + F(right)) mod a``, then ``right = (right + F(left)) mod b``; each round
    can be undone, so the whole is a permutation of 0..a*b-1. A value beyond N goes through it again until it falls
    below N, which keeps it a permutation of 0..N-1 (Black and Rogaway 2002, "Ciphers with arbitrary finite domains",
    methods 2 and 3). With a = ceil(sqrt(N)), b = ceil(N/a) fewer than a of the a*b values lie beyond.
    """

    def __init__(self, samples: int, key: bytes) -> None:
        self._samples = np.uint64(samples)
        left = math.isqrt(samples - 1) + 1
        self._left = np.uint64(left)
        self._right = np.uint64(-(-samples // left))
        self._keys: _Words = np.frombuffer(hashlib.blake2b(key, digest_size=8 * _ROUNDS).digest(), dtype="<u8")

    def __call__(self, positions: _Words) -> _Words:
        values = self._network(positions)
        beyond = np.flatnonzero(values >= self._samples)
        while beyond.size:
            again = self._network(values.flat[beyond])
            values.flat[beyond] = again
            beyond = beyond[again >= self._samples]
        return values

    def _network(self, values: _Words) -> _Words:
        left, right = np.divmod(values, self._right)
        for turn, key in enumerate(self._keys):
            if turn % 2 == 0:
                left = (left + _mix(right, key) % self._left) % self._left
            else:
                right = (right + _mix(left, key) % self._right) % self._right
        return np.asarray(left * self._right + right, dtype=np.uint64)


def _mix(values: _Words, key: np.uint64) -> _Words:
    """Return 64 well-mixed bits per value: the finaliser of MurmurHash3 (Appleby, public domain) on ``value ^ key``."""
    words = values ^ key
    words ^= words >> np.uint64(33)
    words *= np.uint64(0xFF51AFD7ED558CCD)
    words ^= words >> np.uint64(33)
    words *= np.uint64(0xC4CEB9FE1A85EC53)
    words ^= words >> np.uint64(33)
    return words


def _check_range(positions: Indices, samples: int) -> None:
    # A negative position would wrap around in unsigned arithmetic.
    if positions.size and not (positions.min() >= 0 and positions.max() < samples):
        raise IndexError(f"positions of an order are 0..{samples - 1}, not {positions.min()}..{positions.max()}")
