"""What a data set draws at random belongs to the sample, whoever loads it and with whatever beside it."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch

from hpcddp.train.data.loader import Batches, Data, Keyed, Placement
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


def test_generators_are_seeded_alike_in_every_version() -> None:
    samples = Keyed(_Draws()).__getitems__(SampleKeys(seed=0, split="train", epoch=0, indices=[0, 2]))
    assert [index for _, index in samples] == [0, 2]
    assert torch.stack([drawn for drawn, _ in samples]).tolist() == [
        [0.858575090397728, 0.04939589982374337, 0.1883484125137329],
        [0.3641312903818634, 0.643941922966534, 0.13179785013198853],
    ]


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
