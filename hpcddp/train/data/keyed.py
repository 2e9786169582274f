"""Samples with their keys: what a data set draws at random belongs to the sample, not to the process that loads it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch.utils.data import Dataset

from hpcddp.train.randomness import SampleKeys, random_states_put_back, seed_sample

_WORDS_PER_SAMPLE = 3


class KeyedPart(Dataset[Any], ABC):
    """A part of a built-in data set, which takes its random numbers from the samples' keys."""

    @abstractmethod
    def take(self, keys: SampleKeys) -> Any:  # noqa: ANN401
        """Return the samples: one batch, or a list of them."""


class Keyed(Dataset[Any]):
    """A part of any data set, indexed by ``SampleKeys``.

    A part of the user's own is taken sample by sample, and the generators of ``random``, ``numpy.random`` and torch's
    on the CPU are seeded for each: about 10 microseconds a sample. What it draws from another generator is its own.

    Args:
        part: the part.
    """

    def __init__(self, part: Any) -> None:  # noqa: ANN401
        self._part = part

    def __getitem__(self, keys: SampleKeys) -> Any:  # noqa: ANN401
        """Return the samples: one batch, or a list of them."""
        return self.__getitems__(keys)

    def __getitems__(self, keys: SampleKeys) -> Any:  # noqa: ANN401
        """Return the samples: one batch, or a list of them."""
        if isinstance(self._part, KeyedPart):
            return self._part.take(keys)
        with random_states_put_back():
            return [self._sample(index, words) for index, words in zip(keys.indices, self._seeds(keys), strict=True)]

    @staticmethod
    def _seeds(keys: SampleKeys) -> list[list[int]]:
        seeds: list[list[int]] = keys.words(_WORDS_PER_SAMPLE).tolist()
        return seeds

    def _sample(self, index: int, words: list[int]) -> Any:  # noqa: ANN401
        seed_sample(words)
        return self._part[index]
