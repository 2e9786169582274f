"""This rank's micro-batches, in order, from any step on."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hpcddp.batch.groups import GroupTable
from hpcddp.batch.plan import BatchPlan
from hpcddp.batch.sampler import GlobalBatches, share_of
from hpcddp.train.data.images import Batch, Data, WholeBatches
from hpcddp.train.data.keyed import Keyed
from hpcddp.train.data.workers import lost_worker, remember, signals_held, start_worker
from hpcddp.train.errors import DataError, UserCodeError
from hpcddp.train.randomness import SampleKeys
from hpcddp.train.user_code import describe, is_own


class MicroBatchKeys:
    """The samples of this rank's micro-batches, over all epochs; empty shares are left out.

    Args:
        batches: the global batches of the training.
        plan: the split.
        rank: this rank.
        groups: the groups that the batches count; None = they count samples.
        seed: the root seed.
        first_step: where to begin, in optimizer steps done; may lie within an epoch.
        last_step: where to end, exclusive.
    """

    def __init__(
        self,
        batches: GlobalBatches,
        plan: BatchPlan,
        rank: int,
        *,
        groups: GroupTable | None = None,
        seed: int,
        first_step: int,
        last_step: int,
    ) -> None:
        self._batches, self._plan, self._rank, self._groups, self._seed = batches, plan, rank, groups, seed
        self._steps = range(first_step, last_step)

    def __iter__(self) -> Iterator[SampleKeys]:
        for step in self._steps:
            epoch, step_in_epoch = divmod(step, self._batches.steps_per_epoch)
            indices = self._batches.indices(epoch, step_in_epoch)
            for share in share_of(self._plan, indices, self._rank):
                if len(share):
                    samples = share if self._groups is None else self._groups.samples(share)
                    yield SampleKeys(seed=self._seed, split="train", epoch=epoch, indices=samples.tolist())


class Placement:
    """Where and how a batch lies on the device.

    Args:
        device: this rank's device.
        dtype: what floating inputs are cast to; integer inputs stay as they are.
        channels_last: whether images ``[n, C, H, W]`` lie with the channels innermost.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, *, channels_last: bool) -> None:
        self.device, self.dtype, self.channels_last = device, dtype, channels_last

    def place(self, batch: Batch) -> Batch:
        """Return the batch on the device."""
        return self.place_inputs(batch[0]), batch[1].to(self.device, torch.int64, non_blocking=True)

    def place_inputs(self, inputs: Tensor) -> Tensor:
        """Return the inputs on the device."""
        dtype = self.dtype if inputs.is_floating_point() else inputs.dtype
        image = self.channels_last and inputs.ndim == 4  # noqa: PLR2004
        layout = torch.channels_last if image else torch.preserve_format
        return inputs.to(self.device, dtype, non_blocking=True, memory_format=layout)


class Batches:
    """An iterator over batches on the device.

    Args:
        data: the data set; its name is used in errors.
        part: its training or validation part.
        keys: the samples of each batch.
        placement: where batches go.
        workers: processes that load; 0 loads in this one.
    """

    def __init__(
        self,
        data: Data,
        part: Any,  # noqa: ANN401
        keys: Iterable[SampleKeys],
        placement: Placement,
        *,
        workers: int,
    ) -> None:
        self._name, self._classes = data.name, data.classes
        self._placement = placement
        loader: DataLoader[Any] = DataLoader(
            Keyed(part),
            batch_sampler=keys,  # type: ignore[arg-type]  # torch says lists; it passes on whatever comes
            num_workers=workers,
            # A batch that was made in one go needs no collating.
            collate_fn=_as_it_is if isinstance(part, WholeBatches) else None,
            pin_memory=placement.device.type == "cuda",
            worker_init_fn=start_worker if workers else None,
            # A generator of its own: drawing the workers' seed must not move the training's random numbers. The seed is
            # of no consequence, as samples bring theirs.
            generator=torch.Generator(),
            multiprocessing_context="fork" if workers else None,
        )
        with signals_held():
            self._iterator = iter(loader)
        if workers:
            remember(self._iterator)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return self._placement.place(self._load())

    def _load(self) -> Batch:
        try:
            inputs, labels = next(self._iterator)
        except StopIteration:
            raise
        except Exception as error:
            if (lost := lost_worker(error)) is not None:
                raise lost from error
            kind = UserCodeError if is_own(self._name) else DataError
            raise kind(
                f"loading samples of dataset {self._name} failed: {describe(error)}", traceback=traceback.format_exc()
            ) from error
        if is_own(self._name):
            self._check_labels(labels)
        return inputs, labels

    def _check_labels(self, labels: Tensor) -> None:
        """Refuse labels beyond K: the loss would leave some out in silence, and on a GPU others kill the context."""
        smallest, largest = (int(label) for label in labels.aminmax())
        if smallest < 0 or largest >= self._classes:
            raise DataError(
                f"dataset {self._name} has label {smallest if smallest < 0 else largest}, and the model tells apart "
                f"{self._classes} classes, 0..{self._classes - 1}; write a larger train.num_classes, with labels from "
                "0 on"
            )


def choose_workers(num_workers: int | None, data: Data, cpus: int) -> int:
    """Return how many processes load data for this rank.

    Args:
        num_workers: the job's choice; None = 0 for data in memory, else one CPU less than there are.
        data: the data set.
        cpus: CPUs that this task may use.
    """
    if num_workers is not None:
        return num_workers
    return 0 if data.in_memory else max(0, cpus - 1)


def _as_it_is(batch: Any) -> Any:  # noqa: ANN401
    return batch
