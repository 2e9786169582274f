"""Types of the data sets: batches, the training and the validation part, and the reading of samples by their keys."""

from __future__ import annotations

import difflib
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hpcddp.batch.sampler import GroupTable
from hpcddp.train.data.augmentation import CROP_AND_FLIP_DRAWS, crop_and_flip
from hpcddp.train.errors import DataError
from hpcddp.train.randomness import SampleKeys, SampleSeeding

IMAGE_DIMENSIONS: Final = 4
"""Dimensions of a batch of images, ``[n, C, H, W]``."""

MicroBatch: TypeAlias = tuple[Tensor, Tensor]
"""Inputs ``[n, ...]`` and integer labels ``[n]``."""


class MapStyle(Protocol):
    """A map-style data set of PyTorch: a length, and samples by their index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


class KeyedPart(Dataset[Any], ABC):
    """A part of a built-in data set, whose random numbers are derived from the keys of the samples."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return one sample without augmentation: the input of a model (an image: ``[C, H, W]``) and its label."""

    @abstractmethod
    def take(self, keys: SampleKeys) -> MicroBatch:
        """Return the samples of ``keys`` as one batch, with augmentation if the part has any.

        Images may be bytes, so that fewer of them go from process to process and to the device: see ``to_inputs``.
        """

    def to_inputs(self, images: Tensor) -> Tensor:
        """Return the images of ``take`` as a model takes them, on the device they are on."""
        return images


# Small batches of the user's own data set are read several at a time, for about this time. If it takes longer than the
# second, the batches are read one by one.
_READ_S: Final = 0.002
_LONGEST_READ_S: Final = 0.02
# With many more objects at once, Python's garbage collector runs, which takes longer than is saved.
_MOST_SAMPLES: Final = 128


class Keyed(Dataset[Any]):
    """A part of any data set, indexed by ``SampleKeys``.

    Samples of the user's own data set are read one by one, with ``random``, ``numpy.random`` and torch's CPU generator
    seeded for each. Other generators are not seeded. ``__getitems__`` is used instead as long as it draws no random
    numbers, if it gives the samples of the first batch bit for bit as ``__getitem__`` does.
    """

    def __init__(self, part: MapStyle) -> None:
        self._part = part
        self._seeding = SampleSeeding()
        self._read_many: Callable[[list[int]], Sequence[object]] | None = getattr(part, "__getitems__", None)
        self._is_compared = False

    def __getitem__(self, keys: SampleKeys) -> Sequence[Any]:
        """Return the samples: one batch, or a list of them."""
        return self.__getitems__(keys)

    def __getitems__(self, keys: SampleKeys) -> Sequence[Any]:
        """Return the samples: one batch, or a list of them."""
        if isinstance(self._part, KeyedPart):
            return self._part.take(keys)
        samples = None if self._read_many is None else self._seeding.read_unseeded(keys.indices, self._read_many)
        if samples is not None and self._is_compared:
            return samples
        one_by_one = self._seeding.read(keys, self._part.__getitem__)
        self._is_compared = samples is not None and _are_equal([*samples], one_by_one)
        if not self._is_compared:
            self._read_many = None
        return one_by_one

    def read_ahead(self, keys: Iterable[SampleKeys]) -> Iterator[Sequence[Any]]:
        """Yield for each of ``keys`` what indexing returns.

        Small batches of the user's own data set are read several at a time: to compute the seeds and to restore the
        generators costs as much for one batch as for many.
        """
        remaining = iter(keys)
        count = 1
        while True:
            several = list(itertools.islice(remaining, count))
            if not several:
                return
            began = time.perf_counter()
            if len(several) == 1:
                batches: list[Sequence[Any]] | None = [self[several[0]]]
            else:
                batches = self._read_together(several)
            if batches is None:
                for index in several:
                    # A sample that raises does so when its batch is next.
                    yield self[index]
                count = 1
                continue
            fitting_count = int(_READ_S / (time.perf_counter() - began) * len(batches))
            largest_count = 1
            if self._can_join(several[0]):
                largest_count = _MOST_SAMPLES // len(several[0].indices)
            count = max(1, min(largest_count, fitting_count))
            yield from batches

    def _can_join(self, keys: SampleKeys) -> bool:
        """Return whether batches such as this one may be read together.

        Batches of one sample are read alone: a data set may return the same tensor each time, with other values.
        """
        return not isinstance(self._part, KeyedPart) and self._read_many is None and len(keys.indices) > 1

    def _read_together(self, several: Sequence[SampleKeys]) -> list[Sequence[Any]] | None:
        """Return the samples of each of ``several``; None if they are of two epochs, one raises, or it takes long."""
        if several[0].epoch != several[-1].epoch:
            return None
        together = replace(several[0], indices=[index for keys in several for index in keys.indices])
        deadline = time.perf_counter() + _LONGEST_READ_S

        def sample(index: int) -> object:
            if time.perf_counter() > deadline:
                raise TimeoutError
            return self._part[index]

        try:
            samples = iter(self._seeding.read(together, sample))
        except Exception:  # noqa: BLE001  the data set may raise anything
            return None
        return [[*itertools.islice(samples, len(keys.indices))] for keys in several]


def _are_equal(first: Sequence[object], other: Sequence[object]) -> bool:
    try:
        torch.testing.assert_close(first, other, rtol=0, atol=0, equal_nan=True)
    except (AssertionError, TypeError, ValueError):
        return False
    return True


class WholeBatches(KeyedPart):
    """A part of a data set in memory, with inputs of any shape."""

    @abstractmethod
    def __getitems__(self, indices: Sequence[int]) -> MicroBatch:
        """Return the samples at ``indices`` as one batch, without augmentation, as a model takes them."""

    def take(self, keys: SampleKeys) -> MicroBatch:
        """Return the samples of ``keys`` as one batch."""
        return self.__getitems__(keys.indices)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return one sample: the input as a model takes it, and its label."""
        inputs, labels = self.__getitems__([index])
        return inputs[0], int(labels[0])


_CACHED_NUMBERS: Final = 2**18


class Normalisation:
    """Makes numbers around 0 from pixels that are bytes: (pixel / unit - shift) / spread, in float32.

    Args:
        shift: per channel.
        spread: per channel.
        unit: the pixel value that stands for 1; None = pixels are not divided.
    """

    def __init__(self, shift: Tensor, spread: Tensor, *, unit: int | None = None) -> None:
        self._shift = shift.view(1, -1, 1, 1)
        self._spread = spread.view(1, -1, 1, 1)
        # A tensor on the device: a GPU would multiply by the rounded 1 / unit.
        self._unit = None if unit is None else torch.tensor(float(unit))

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return the numbers ``[n, C, H, W]``, float32, on the device of ``pixels``."""
        if pixels.device != self._shift.device:
            self._shift = self._shift.to(pixels.device)
            self._spread = self._spread.to(pixels.device)
            if self._unit is not None:
                self._unit = self._unit.to(pixels.device)
        layout = torch.preserve_format
        images_at_once = max(1, len(pixels))
        if pixels.device.type == "cpu":
            layout = torch.contiguous_format
            # A part at a time that stays in the cache: that takes a third of the time.
            numbers_per_image = max(1, pixels[:1].numel())
            images_at_once = max(1, _CACHED_NUMBERS // numbers_per_image)
        numbers = torch.empty_like(pixels, dtype=torch.float32, memory_format=layout)
        parts = zip(torch.split(numbers, images_at_once), torch.split(pixels, images_at_once), strict=True)
        for part, source in parts:
            part.copy_(source)
            if self._unit is not None:
                part.div_(self._unit)
            part.sub_(self._shift).div_(self._spread)
        return numbers


class MemoryImages(WholeBatches):
    """Small images that are kept in memory as bytes and normalised per batch.

    Args:
        pixels: ``[N, C, H, W]``, uint8.
        labels: ``[N]``, int64, 0..len(classes)-1.
        classes: names of the classes.
        levels: the pixel value that stands for 1.0.
        mean: per channel, of pixels scaled to 0..1.
        std: per channel, likewise.
        crop_padding: padding of the random crops, in pixels; images are also flipped at random. None = no augmentation.
    """

    def __init__(
        self,
        pixels: Tensor,
        labels: Tensor,
        *,
        classes: Sequence[str],
        levels: int,
        mean: Sequence[float],
        std: Sequence[float],
        crop_padding: int | None = None,
    ) -> None:
        self.classes = tuple(classes)
        self.targets = labels
        self._pixels = pixels
        self._crop_padding = crop_padding
        self._normalise = Normalisation(torch.tensor(mean).mul_(levels), torch.tensor(std).mul_(levels))

    def __len__(self) -> int:
        return len(self._pixels)

    def __getitems__(self, indices: Sequence[int]) -> MicroBatch:
        """Return normalised images ``[n, C, H, W]``, float32, and labels ``[n]``."""
        chosen = torch.as_tensor(indices)
        return self._normalise(self._pixels[chosen]), self.targets[chosen]

    def take(self, keys: SampleKeys) -> MicroBatch:
        """Return images ``[n, C, H, W]``, uint8, augmented if the part is, and labels ``[n]``."""
        chosen = torch.as_tensor(keys.indices)
        pixels = self._pixels[chosen]
        if self._crop_padding is not None:
            pixels = crop_and_flip(pixels, keys.fractions(CROP_AND_FLIP_DRAWS), padding=self._crop_padding)
        return pixels, self.targets[chosen]

    def to_inputs(self, images: Tensor) -> Tensor:
        """Return normalised images, float32."""
        return self._normalise(images)


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The training and validation parts of a data set.

    Args:
        name: as the job file has it.
        train: the training part, map-style.
        val: the validation part, map-style.
        classes: K, number of classes.
        fingerprint: hex digest that identifies the training data.
        groups: groups of the training samples if the batch counts groups; None = it counts samples.
    """

    name: str
    train: Any
    val: Any
    classes: int
    fingerprint: str
    groups: GroupTable | None = None

    @property
    def units(self) -> int:
        """Number of units that the batch counts in the training part: groups if there are any, else samples."""
        return len(self.train) if self.groups is None else len(self.groups)

    @property
    def in_memory(self) -> bool:
        """Whether batches are made from memory, so that loader workers would only slow them down."""
        return isinstance(self.train, WholeBatches)


def refuse_unknown(dataset: str, arguments: Mapping[str, Any], names: Sequence[str]) -> None:
    """Refuse an argument that the data set does not have.

    Raises:
        DataError: names it, and the closest argument or all of them.
    """
    for name in arguments:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            if near:
                advice = f"did you mean {near[0]}"
            elif names:
                advice = f"write one of {', '.join(names)}"
            else:
                advice = "leave it out"
            raise DataError(f"train.dataset_args.{name} is given, but dataset {dataset} has no such argument; {advice}")
