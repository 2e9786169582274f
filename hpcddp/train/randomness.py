"""Seeds and random numbers that are derived from the root seed by keys (batch contract, section 5)."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from hpcddp.batch.order import CONTRACT_VERSION

Words: TypeAlias = NDArray[np.uint64]
DataSplit: TypeAlias = Literal["train", "val"]

# 2^64 divided by the golden ratio: the step of SplitMix64.
GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)


def keyed_seed(*key: int | str) -> int:
    """Return a 63-bit seed that depends on every part of ``key``, and on their order."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in key)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def seed_initialisation(seed: int) -> None:
    """Seed torch so that all ranks draw the same initial parameters."""
    torch.manual_seed(keyed_seed("initialisation", seed))


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed torch so that the noise of a forward, such as dropout, is a function of (seed, step, rank) only.

    Args:
        seed: the root seed.
        step: optimizer steps done before this one.
        rank: this rank; dropout masks differ between ranks.
    """
    torch.manual_seed(keyed_seed("step", seed, step, rank))


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleKeys:
    """The keys of some samples, and the random numbers that are derived from them.

    The random numbers of a sample are a function of (seed, split, epoch, index) only: not of the other samples of its
    batch, the rank, or the number of ranks, micro-steps or loader workers. They are computed with 64-bit integer
    arithmetic and a hash, so that they are the same on every platform and with every version of numpy and torch.

    Args:
        seed: the root seed.
        split: the part of the data set.
        epoch: zero-based; always 0 for a validation part, so that evaluations can be compared.
        indices: the samples, 0..2^63-1 each.
    """

    seed: int
    split: DataSplit
    epoch: int
    indices: Sequence[int]

    def words(self, draws: int) -> Words:
        """Return ``draws`` random 64-bit words per sample, ``[n, draws]``; a larger ``draws`` changes none."""
        text = f"hpcddp samples {CONTRACT_VERSION}: seed {self.seed}, split {self.split}, epoch {self.epoch}"
        keys = np.frombuffer(hashlib.blake2b(text.encode(), digest_size=16).digest(), dtype="<u8")
        states = np.asarray(self.indices, dtype=np.uint64)
        for key in keys:
            states = mix(states ^ key)
        return split_mix(states, draws)

    def fractions(self, draws: int) -> NDArray[np.float64]:
        """Return ``draws`` random numbers for each sample, ``[n, draws]``: multiples of 2^-53, uniform in [0, 1)."""
        return (self.words(draws) >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)


def split_mix(states: Words, draws: int) -> Words:
    """Return the first ``draws`` words of the generator SplitMix64 for each state: ``[n]`` to ``[n, draws]``.

    Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators": word j is ``mix(state + j * GOLDEN)``,
    j = 1, 2, ..., modulo 2^64.
    """
    return mix(states[:, np.newaxis] + np.arange(1, draws + 1, dtype=np.uint64) * GOLDEN)


def mix(words: Words) -> Words:
    """Return the words after the finaliser of SplitMix64, a bijection that mixes all bits."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def seed_sample(words: Sequence[int]) -> None:
    """Seed ``random``, ``numpy.random`` and torch's CPU generator, which data sets use.

    Args:
        words: three 64-bit integers.
    """
    for_python, for_numpy, for_torch = words
    random.seed(for_python)
    np.random.seed(for_numpy >> 32)  # noqa: NPY002  the generator that transforms draw from
    # torch.manual_seed would also seed the GPU's generators, which belong to the model, and takes a hundred times as
    # long.
    torch.default_generator.manual_seed(for_torch)


@contextmanager
def random_states_put_back() -> Iterator[None]:
    """Restore the generators that ``seed_sample`` seeds after the block."""
    python, arrays, tensors = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)  # noqa: NPY002
        torch.set_rng_state(tensors)
