"""Load this rank's micro-batches in order, starting at any step."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from hpcddp.batch.plan import BatchPlan
from hpcddp.batch.sampler import GlobalBatches, GroupTable, share_of
from hpcddp.jobfile.datasets import is_in_memory
from hpcddp.jobfile.fields import is_reference
from hpcddp.stop.listener import signals_held
from hpcddp.train.data.workers import lost_worker, register_workers, start_worker
from hpcddp.train.errors import DataError, UserCodeError
from hpcddp.train.precision import kept_in
from hpcddp.train.randomness import SampleKeys, SampleSeeding
from hpcddp.train.user_code import describe

MicroBatch: TypeAlias = tuple[Tensor, Tensor]
"""Inputs ``[n, ...]`` and integer labels ``[n]``."""


class MapStyle(Protocol):
    """A map-style data set of PyTorch: a length, and samples by their index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


def unchanged(inputs: Tensor) -> Tensor:
    """Return the inputs."""
    return inputs


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
        to_inputs: makes inputs of a model of the batched inputs of samples, on the device they are on. Images of a
            folder leave the loader processes as bytes.
    """

    name: str
    train: Any
    val: Any
    classes: int
    fingerprint: str
    groups: GroupTable | None = None
    to_inputs: Callable[[Tensor], Tensor] = unchanged

    @property
    def units(self) -> int:
        """Number of units that the batch counts in the training part: groups if there are any, else samples."""
        return len(self.train) if self.groups is None else len(self.groups)


# Of a batch of images, [n, C, H, W].
_IMAGE_DIMENSIONS: Final = 4


def micro_batch_keys(
    batches: GlobalBatches,
    plan: BatchPlan,
    rank: int,
    *,
    groups: GroupTable | None = None,
    seed: int,
    first_step: int,
    last_step: int,
) -> Iterator[SampleKeys]:
    """Yield the sample keys of this rank's micro-batches, over all epochs, without empty shares.

    Args:
        groups: the groups that the batches count; None = they count samples.
        first_step: the first step, in optimizer steps done; may be within an epoch.
        last_step: the end, exclusive.
    """
    for step in range(first_step, last_step):
        epoch, step_in_epoch = batches.steps.place(step)
        indices = batches.indices(epoch, step_in_epoch)
        for share in share_of(plan, indices, rank):
            if len(share):
                samples = share if groups is None else groups.samples(share)
                yield SampleKeys(seed=seed, split="train", epoch=epoch, indices=samples.tolist())


class Placement:
    """Device, dtype and memory format of batches.

    Args:
        dtype: of floating-point inputs and of the parts of complex ones; integer inputs keep their dtype.
        channels_last: whether images ``[n, C, H, W]`` are in channels-last memory format.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, *, channels_last: bool) -> None:
        self.device = device
        self.dtype = dtype
        self.channels_last = channels_last

    def place(self, batch: MicroBatch, to_inputs: Callable[[Tensor], Tensor]) -> MicroBatch:
        """Return a batch on the device, after ``to_inputs`` of its data set."""
        inputs, labels = batch
        inputs = to_inputs(inputs.to(self.device, non_blocking=True))
        return self.place_inputs(inputs), labels.to(self.device, torch.int64, non_blocking=True)

    def place_inputs(self, inputs: Tensor) -> Tensor:
        """Return the inputs on the device."""
        are_images = inputs.ndim == _IMAGE_DIMENSIONS
        layout = torch.channels_last if self.channels_last and are_images else torch.contiguous_format
        return inputs.to(self.device, kept_in(inputs, self.dtype), non_blocking=True, memory_format=layout)


class Keyed(Dataset[Any]):
    """A part of a data set, indexed by ``SampleKeys``.

    Samples are read one by one, with ``random``, ``numpy.random`` and torch's CPU generator seeded for each. Other
    generators are not seeded.
    """

    def __init__(self, part: MapStyle) -> None:
        self._part = part
        self._seeding = SampleSeeding()

    def __getitems__(self, keys: SampleKeys) -> list[Any]:
        """Return the samples."""
        return self._seeding.read(keys, self._part.__getitem__)


class Batches:
    """Batches of a part of a data set, on the device. Each iteration gives all of them, with the same loader processes.

    Args:
        data: the data set.
        part: its training or validation part.
        keys: the keys of each batch.
        placement: where batches are placed.
        workers: loader processes; 0 loads in this process.
    """

    def __init__(
        self,
        data: Data,
        part: MapStyle,
        keys: Iterable[SampleKeys],
        placement: Placement,
        *,
        workers: int,
    ) -> None:
        self._data = data
        self._keys = keys
        self._placement = placement
        self._keyed = Keyed(part)
        # None where this process loads the batches for a CPU: a DataLoader adds a tenth to the time of a small batch.
        self._loader: DataLoader[Any] | None = None
        if workers > 0 or placement.device.type != "cpu":
            self._loader = self._data_loader(workers)

    def _data_loader(self, workers: int) -> DataLoader[Any]:
        return DataLoader(
            self._keyed,
            # torch's types ask for lists of indices; it passes on to the data set what it gets.
            batch_sampler=cast("Iterable[list[int]]", self._keys),
            num_workers=workers,
            pin_memory=self._placement.device.type == "cuda",
            worker_init_fn=start_worker if workers else None,
            # Its own generator: the DataLoader draws a seed for its workers, which must not advance the training's
            # generator. The seed itself is not used, since samples are seeded by their keys.
            generator=torch.Generator(),
            multiprocessing_context="fork" if workers else None,
            persistent_workers=workers > 0,
        )

    def __iter__(self) -> Iterator[MicroBatch]:
        if self._loader is None:
            batches = self._load(default_collate(self._keyed.__getitems__(keys)) for keys in self._keys)
        else:
            with signals_held():
                iterator = iter(self._loader)
            register_workers(iterator)
            batches = self._load(iterator)
        device = self._placement.device
        if device.type == "cuda":
            return _place_ahead(batches, self._place, device)
        return map(self._place, batches)

    def _place(self, batch: MicroBatch) -> MicroBatch:
        return self._placement.place(batch, self._data.to_inputs)

    def _load(self, iterator: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        while True:
            try:
                inputs, labels = next(iterator)
            except StopIteration:
                return
            except Exception as error:
                worker_error = lost_worker(error)
                if worker_error is not None:
                    raise worker_error from error
                error_type = UserCodeError if is_reference(self._data.name) else DataError
                raise error_type(
                    f"loading samples of dataset {self._data.name} failed: {describe(error)}",
                    traceback=traceback.format_exc(),
                ) from error
            if is_reference(self._data.name):
                self._check_labels(labels)
            yield inputs, labels

    def _check_labels(self, labels: Tensor) -> None:
        """Refuse labels outside 0..K-1: the loss silently ignores some, and others break the CUDA context."""
        classes = self._data.classes
        smallest, largest = (int(label) for label in labels.aminmax())
        if smallest < 0:
            wrong_label = smallest
        elif largest >= classes:
            wrong_label = largest
        else:
            return
        raise DataError(
            f"dataset {self._data.name} has label {wrong_label}, and the model has {classes} classes, "
            f"0..{classes - 1}; write a larger train.num_classes, with labels from 0 on"
        )


def _place_ahead(
    batches: Iterator[MicroBatch], move: Callable[[MicroBatch], MicroBatch], device: torch.device
) -> Iterator[MicroBatch]:
    """Place each batch on a GPU while the one before it is in use, on a stream of its own."""
    # torch leaves the class without types.
    new_stream: Callable[..., torch.cuda.Stream] = torch.cuda.Stream
    stream = new_stream(device)

    def place_next() -> MicroBatch | None:
        batch = next(batches, None)
        if batch is None:
            return None
        with torch.cuda.stream(stream):
            return move(batch)

    coming = place_next()
    while coming is not None:
        current = coming
        in_use = torch.cuda.current_stream(device)
        in_use.wait_stream(stream)
        for tensor in current:
            # Its memory is not given to the next batch before the training's stream has used it.
            tensor.record_stream(in_use)
        coming = place_next()
        yield current


def choose_workers(num_workers: int | None, data: Data, cpus: int) -> int:
    """Return the number of loader processes of this rank.

    Args:
        num_workers: the job's setting; None = 0 for data in memory, else one less than ``cpus``.
        cpus: CPUs of this task.
    """
    if num_workers is not None:
        return num_workers
    return 0 if is_in_memory(data.name) else max(0, cpus - 1)
