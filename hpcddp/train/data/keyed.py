"""Data sets that are indexed by sample keys, so that random augmentation depends on the sample only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from torch.utils.data import Dataset

from hpcddp.train.randomness import SampleKeys, random_states_put_back, seed_sample

_WORDS_PER_SAMPLE = 3


class MapStyle(Protocol):
    """A map-style data set of PyTorch: a length, and samples by their index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


class KeyedPart(Dataset[Any], ABC):
    """A part of a built-in data set, whose random numbers are derived from the keys of the samples."""

    @abstractmethod
    def take(self, keys: SampleKeys) -> Sequence[Any]:
        """Return the samples: one batch, or a list of them."""


class Keyed(Dataset[Any]):
    """A part of any data set, indexed by ``SampleKeys``.

    Samples of the user's own data set are read one by one, and ``random``, ``numpy.random`` and torch's CPU generator
    are seeded for each, in about 10 microseconds. Other generators are not seeded.
    """

    def __init__(self, part: MapStyle) -> None:
        self._part = part

    def __getitem__(self, keys: SampleKeys) -> Sequence[Any]:
        """Return the samples: one batch, or a list of them."""
        return self.__getitems__(keys)

    def __getitems__(self, keys: SampleKeys) -> Sequence[Any]:
        """Return the samples: one batch, or a list of them."""
        if isinstance(self._part, KeyedPart):
            return self._part.take(keys)
        with random_states_put_back():
            return [self._sample(index, words) for index, words in zip(keys.indices, self._seeds(keys), strict=True)]

    @staticmethod
    def _seeds(keys: SampleKeys) -> list[list[int]]:
        seeds: list[list[int]] = keys.words(_WORDS_PER_SAMPLE).tolist()
        return seeds

    def _sample(self, index: int, words: list[int]) -> object:
        seed_sample(words)
        return self._part[index]
