"""What a data set draws at random belongs to the sample, whoever loads it and with whatever beside it."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch

from hpcddp.train.data import parts
from hpcddp.train.data.loader import Batches, Placement
from hpcddp.train.data.parts import Data, Keyed
from hpcddp.train.randomness import SampleKeys
from tests.distributed.own_code import FewDigits, noisy_digits
from tests.distributed.training import result
from tests.train.conftest import Training

PLACEMENT = Placement(torch.device("cpu"), torch.float32, channels_last=False)


def load(batches: Iterable[list[int]], *, workers: int = 0, **changes: Any) -> dict[int, torch.Tensor]:
    """Return the images of noisy digits by index."""
    part = noisy_digits("train")
    data = Data(name="own:noisy", train=part, val=part, classes=10, fingerprint="")
    keys = [SampleKeys(**{"seed": 0, "split": "train", "epoch": 0, "indices": batch, **changes}) for batch in batches]
    found = Batches(data, part, keys, PLACEMENT, workers=workers)
    return {
        index: image
        for key, (images, _) in zip(keys, found, strict=True)
        for index, image in zip(key.indices, images, strict=True)
    }


@pytest.mark.parametrize("workers", [0, 2])
def test_random_transform_gives_a_sample_the_same_in_any_batch_and_process(workers: int) -> None:
    one = load([[index] for index in range(6)])
    other = load([[5, 0, 3], [1], [4, 2]], workers=workers)
    assert all(torch.equal(one[index], other[index]) for index in range(6))


def test_random_transform_differs_between_epochs_seeds_and_parts_and_repeats() -> None:
    changes: list[dict[str, Any]] = [{}, {"epoch": 1}, {"seed": 1}, {"split": "val"}]
    images = [load([[3]], **change)[3] for change in changes]
    assert not any(torch.equal(a, b) for i, a in enumerate(images) for b in images[i + 1 :])
    assert torch.equal(load([[3]], epoch=1)[3], images[1])


class _Draws(FewDigits):
    """Gives what each generator draws first."""

    def __init__(self) -> None:
        super().__init__("train", 3, first=0, poison=None)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        drawn = random.random(), float(np.random.random()), float(torch.rand(()))  # noqa: NPY002
        return torch.tensor(drawn, dtype=torch.float64), index

    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]


def test_generators_are_seeded_alike_in_every_version() -> None:
    # A data set that draws random numbers is asked for one sample after the other, even if it could give many at once.
    samples = Keyed(_Draws()).__getitems__(SampleKeys(seed=0, split="train", epoch=0, indices=[0, 2]))
    assert [index for _, index in samples] == [0, 2]
    assert torch.stack([drawn for drawn, _ in samples]).tolist() == [
        [0.858575090397728, 0.04939589982374337, 0.1883484125137329],
        [0.3641312903818634, 0.643941922966534, 0.13179785013198853],
    ]


class _Many(FewDigits):
    """Gives many samples at once, and counts how often; the samples of some indices draw random numbers."""

    def __init__(self, *, noisy_from: int = 100, error: float = 0.0) -> None:
        super().__init__("train", 8, first=0, poison=None)
        self.noisy_from, self.error = noisy_from, error
        self.together, self.alone = 0, 0

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.alone += 1
        return self._sample(index)

    def _sample(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.rand(()) if index >= self.noisy_from else torch.zeros(())
        return torch.tensor(float(index)) + noise, index

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, int]]:
        self.together += 1
        return [(value + self.error, index) for value, index in map(self._sample, indices)]


def read(part: _Many, *batches: list[int]) -> list[list[float]]:
    keyed = Keyed(part)
    keys = [SampleKeys(seed=0, split="train", epoch=0, indices=indices) for indices in batches]
    return [[float(value) for value, _ in keyed.__getitems__(key)] for key in keys]


def test_data_set_that_gives_many_samples_at_once_is_asked_for_them_at_once() -> None:
    part = _Many()
    assert read(part, [0, 1], [2, 3], [4, 5]) == [[0, 1], [2, 3], [4, 5]]
    # The first batch is read both ways, to compare them.
    assert (part.together, part.alone) == (3, 2)


def test_data_set_whose_batches_are_not_its_samples_is_asked_for_one_after_the_other() -> None:
    part = _Many(error=1e-6)
    assert read(part, [0, 1], [2, 3], [4, 5]) == [[0, 1], [2, 3], [4, 5]]
    assert (part.together, part.alone) == (1, 6)


def test_samples_that_draw_later_are_keyed_all_the_same() -> None:
    part, alone = _Many(noisy_from=3), _Many(noisy_from=3, error=1.0)
    batches = [[0, 1], [2, 3], [4, 5]]
    assert read(part, *batches) == read(alone, *batches)
    assert (part.together, part.alone) == (2, 6)


def keys_of_epochs() -> list[SampleKeys]:
    """Return the keys of 60 batches of two to four of six samples, in two epochs."""
    epochs = [(epoch, number) for epoch in (0, 1) for number in range(30)]
    return [
        SampleKeys(seed=0, split="train", epoch=epoch, indices=[(number + i) % 6 for i in range(2 + number % 3)])
        for epoch, number in epochs
    ]


class _Counted(FewDigits):
    """Digits that count how many samples were read."""

    seconds = 0.0
    read = 0

    def __init__(self) -> None:
        super().__init__("train", 60, first=0, poison=None)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.read += 1
        time.sleep(self.seconds)
        return super().__getitem__(index)

    def ahead(self, keys: list[SampleKeys]) -> list[int]:
        """Return how many samples more than those of each batch had been read when it came."""
        self.read = 0
        batches = Keyed(self).read_ahead(keys)
        return [self.read - sum(len(one.indices) for one in keys[: number + 1]) for number, _ in enumerate(batches)]


def test_batches_that_are_read_together_are_those_that_are_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_READ_S", 60.0)
    monkeypatch.setattr(parts, "_MOST_SAMPLES", 16)
    part = noisy_digits("train")
    together, alone = list(Keyed(part).read_ahead(keys_of_epochs())), [Keyed(part)[keys] for keys in keys_of_epochs()]
    assert [[label for _, label in batch] for batch in together] == [[label for _, label in batch] for batch in alone]
    for one, other in zip(together, alone, strict=True):
        assert all(torch.equal(left, right) for (left, _), (right, _) in zip(one, other, strict=True))


def test_small_batches_are_read_together_and_slow_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    part = _Counted()
    part.seconds = 0.002
    assert part.ahead(keys_of_epochs()[:6]) == [0] * 6
    part.seconds = 0.0
    monkeypatch.setattr(parts, "_READ_S", 60.0)
    monkeypatch.setattr(parts, "_LONGEST_READ_S", 60.0)
    assert max(part.ahead(keys_of_epochs()[:30])) > 30
    # They have become slow.
    monkeypatch.setattr(parts, "_LONGEST_READ_S", 0.0)
    assert part.ahead(keys_of_epochs()[:30])[-1] == 0


def test_memory_that_a_data_set_gives_for_each_sample_is_right_for_batches_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Reused(FewDigits):
        memory = torch.zeros(())

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return self.memory.fill_(index), index

    monkeypatch.setattr(parts, "_READ_S", 60.0)
    part = Reused("train", 60, first=0, poison=None)
    keys = [SampleKeys(seed=0, split="train", epoch=0, indices=[index]) for index in range(60)]
    assert [float(batch[0][0]) for batch in Keyed(part).read_ahead(keys)] == list(range(60))


# Python turns the second into an error, so that it ends no iteration.
@pytest.mark.parametrize(("raised", "found"), [(ValueError, ValueError), (StopIteration, RuntimeError)])
def test_sample_that_raises_does_so_when_its_batch_is_next(
    monkeypatch: pytest.MonkeyPatch, raised: type[Exception], found: type[Exception]
) -> None:
    class Broken(FewDigits):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            if index == 50:
                raise raised
            return super().__getitem__(index)

    monkeypatch.setattr(parts, "_READ_S", 60.0)
    part = Broken("train", 60, first=0, poison=None)
    keys = [SampleKeys(seed=0, split="train", epoch=0, indices=[index, index + 1]) for index in range(0, 60, 2)]
    batches = Keyed(part).read_ahead(keys)
    assert [next(batches)[0][1] for _ in range(25)] == part.labels[:50:2].tolist()
    with pytest.raises(found):
        next(batches)


def test_generator_of_ones_own_can_be_seeded_from_the_sample() -> None:
    class OwnGenerator(FewDigits):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return torch.tensor(np.random.default_rng(torch.initial_seed()).random()), index

    keyed = Keyed(OwnGenerator("train", 3, first=0, poison=None))
    one, other = (
        {
            index: float(value)
            for value, index in keyed.__getitems__(SampleKeys(seed=0, split="train", epoch=0, indices=indices))
        }
        for indices in ([0, 1, 2], [2, 0, 1])
    )
    assert one == other
    assert len(set(one.values())) == 3


def test_loading_leaves_the_generators_of_the_training_alone() -> None:
    torch.manual_seed(1)
    random.seed(1)
    expected = torch.rand(3).tolist(), random.random()
    torch.manual_seed(1)
    random.seed(1)
    load([[1, 2], [0]])
    assert (torch.rand(3).tolist(), random.random()) == expected


def test_training_with_dropout_and_random_samples_does_not_depend_on_its_loader_workers(new_training: Any) -> None:
    digests = set()
    for workers in (0, 2):
        run: Training = new_training(f"workers-{workers}")
        run.train(
            train__model="tests.distributed.own_code:norm_model",
            train__dataset="tests.distributed.own_code:noisy_digits",
            train__num_workers=workers,
            train__epochs=2,
        )
        digests.add(result(run.run.path)["parameters_sha256"])
    assert len(digests) == 1
