"""Seeds and random numbers that are derived from the root seed by keys (batch contract, section 5)."""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np
import torch
from numpy.random import get_bit_generator, set_bit_generator  # type: ignore[attr-defined]  # public, not marked so
from numpy.typing import NDArray

from hpcddp.batch.order import CONTRACT_VERSION

Words: TypeAlias = NDArray[np.uint64]
DataSplit: TypeAlias = Literal["train", "val"]

# 2^64 divided by the golden ratio: the step of SplitMix64.
GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_SHIFTS: Final = (np.uint64(30), np.uint64(27), np.uint64(31))
_FACTORS: Final = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))

# One word each for random, numpy.random and torch.
_WORDS_PER_SAMPLE: Final = 3
# numpy.random is seeded so for samples that do not draw from it, and these are the first numbers that it then gives.
_SEED_OF_UNUSED: Final = 0
_NEXT_OF_UNUSED: Final = [2357136044, 2546248239]


def keyed_seed(*key: int | str) -> int:
    """Return a 63-bit seed that depends on every part of ``key``, and on their order."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in key)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def seed_initialisation(seed: int) -> None:
    """Seed torch so that all ranks draw the same initial parameters."""
    torch.manual_seed(keyed_seed("initialisation", seed))


def seed_step(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Seed torch so that the noise of a forward, such as dropout, is a function of (seed, step, rank) only.

    The generators are seeded one by one: ``torch.manual_seed`` takes 0.2 ms, most of it to format the caller's stack
    for a CUDA that is not in use.

    Args:
        step: optimizer steps done before this one.
        rank: this rank; dropout masks differ between ranks.
        device: the device of the forward.
    """
    step_seed = keyed_seed("step", seed, step, rank)
    torch.default_generator.manual_seed(step_seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(step_seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleKeys:
    """The keys of some samples, and the random numbers that are derived from them.

    The random numbers of a sample are a function of (seed, split, epoch, index) only: not of the other samples of its
    batch, the rank, or the number of ranks, micro-steps or loader workers. They are computed with 64-bit integer
    arithmetic and a hash, so that they are the same on every platform and with every version of numpy and torch.

    Args:
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
        states = np.array(self.indices, dtype=np.uint64)
        for key in _sample_keys(self.seed, self.split, self.epoch):
            states ^= key
            states = mix(states)
        return split_mix(states, draws)


@functools.lru_cache(maxsize=2)
def _sample_keys(seed: int, split: DataSplit, epoch: int) -> list[np.uint64]:
    text = f"hpcddp samples {CONTRACT_VERSION}: seed {seed}, split {split}, epoch {epoch}"
    return list(np.frombuffer(hashlib.blake2b(text.encode(), digest_size=16).digest(), dtype="<u8"))


def split_mix(states: Words, draws: int) -> Words:
    """Return the first ``draws`` words of the generator SplitMix64 for each state: ``[n]`` to ``[n, draws]``.

    Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators": word j is ``mix(state + j * GOLDEN)``,
    j = 1, 2, ..., modulo 2^64.
    """
    return mix(states[:, np.newaxis] + np.arange(1, draws + 1, dtype=np.uint64) * GOLDEN)


def mix(words: Words) -> Words:
    """Return the words after the finaliser of SplitMix64, a bijection that mixes all bits."""
    words = words ^ (words >> _SHIFTS[0])
    words *= _FACTORS[0]
    words ^= words >> _SHIFTS[1]
    words *= _FACTORS[1]
    words ^= words >> _SHIFTS[2]
    return words


class SampleSeeding:
    """Seeds torch's CPU generator, ``random`` and ``numpy.random`` for each sample that is read.

    The last two are seeded only once a sample has drawn from one of them, as to seed them takes longer than to read a
    small sample. Whether one has is checked after every batch; if so, the batch is read again. A sample that draws is
    therefore always made with seeded generators.
    """

    def __init__(self) -> None:
        self._seeds_all = False
        # It takes the place of numpy's own, whose state takes 0.1 ms to keep and restore.
        self._numpy = np.random.MT19937()

    def read(self, keys: SampleKeys, sample: Callable[[int], object]) -> list[object]:
        """Return the samples of ``keys``. The generators are restored, except for a normal number that numpy caches.

        Args:
            sample: returns the sample of an index.
        """
        seeds = keys.words(_WORDS_PER_SAMPLE).tolist()
        python_before, torch_before, numpy_before = random.getstate(), torch.get_rng_state(), get_bit_generator()
        set_bit_generator(self._numpy)
        try:
            np.random.seed(_SEED_OF_UNUSED)  # noqa: NPY002  the generator that transforms draw from
            samples = self._read(keys.indices, seeds, sample)
            if not self._seeds_all and (random.getstate() != python_before or self._numpy_has_drawn()):
                self._seeds_all = True
                samples = self._read(keys.indices, seeds, sample)
            return samples
        finally:
            # numpy caches every second normal number: that of a sample is dropped.
            np.random.seed(_SEED_OF_UNUSED)  # noqa: NPY002  as above
            random.setstate(python_before)
            set_bit_generator(numpy_before)
            torch.set_rng_state(torch_before)

    def _read(
        self, indices: Sequence[int], seeds: Sequence[Sequence[int]], sample: Callable[[int], object]
    ) -> list[object]:
        samples = []
        # torch.manual_seed would also seed the GPU's generators, which belong to the model.
        seed_torch = torch.default_generator.manual_seed
        for index, (for_python, for_numpy, for_torch) in zip(indices, seeds, strict=True):
            seed_torch(for_torch)
            if self._seeds_all:
                random.seed(for_python)
                np.random.seed(for_numpy >> 32)  # noqa: NPY002  as above
            samples.append(sample(index))
        return samples

    def _numpy_has_drawn(self) -> bool:
        """Return whether numbers were drawn from numpy's generator since it was seeded with ``_SEED_OF_UNUSED``."""
        return bool(self._numpy.random_raw(2).tolist() != _NEXT_OF_UNUSED)
