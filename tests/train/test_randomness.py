"""Random numbers that belong to samples, steps and ranks."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from hpcddp.train.randomness import (
    SampleKeys,
    SampleSeeding,
    keyed_seed,
    seed_initialisation,
    seed_step,
    split_mix,
)

MASK = (1 << 64) - 1


def keys(**changes: Any) -> SampleKeys:
    return SampleKeys(**{"seed": 0, "split": "train", "epoch": 0, "indices": [0, 1, 49_999], **changes})


def test_generator_gives_the_published_words() -> None:
    # Vigna's splitmix64.c for seed 1234567.
    assert split_mix(np.array([1234567], dtype=np.uint64), 5).tolist() == [
        [
            6457827717110365317,
            3203168211198807973,
            9817491932198370423,
            4593380528125082431,
            16408922859458223821,
        ]
    ]


def mixed(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def test_words_of_samples_stay_what_they_are_in_every_version() -> None:
    assert keys(indices=[0, 1, 10**12]).words(2).tolist() == [
        [4966985869980433452, 1258875984224079602],
        [2569595769944043130, 13420958453821967929],
        [25235516498792761, 10117012696324498549],
    ]


def test_words_of_samples_are_those_of_the_arithmetic_written_out() -> None:
    digest = hashlib.blake2b(b"hpcddp samples 1: seed 5, split val, epoch 3", digest_size=16).digest()
    state = 77
    for place in (0, 8):
        state = mixed(state ^ int.from_bytes(digest[place : place + 8], "little"))
    expected = [mixed((state + j * 0x9E3779B97F4A7C15) & MASK) for j in (1, 2, 3)]
    assert keys(seed=5, split="val", epoch=3, indices=[77]).words(3).tolist() == [expected]


def test_numbers_of_a_sample_depend_on_its_key_alone() -> None:
    together, alone = keys().words(3), keys(indices=[49_999]).words(5)
    assert np.array_equal(together[2], alone[0, :3])


def test_numbers_differ_with_every_part_of_the_key() -> None:
    changes: list[dict[str, Any]] = [{}, {"seed": 1}, {"epoch": 1}, {"split": "val"}, {"seed": 1, "epoch": 1}]
    words = np.concatenate([keys(**change).words(4) for change in changes])
    assert len(np.unique(words)) == words.size


def test_words_are_uniform_and_independent_of_each_other() -> None:
    words = np.concatenate([keys(epoch=epoch, indices=range(20_000)).words(3) for epoch in range(2)], axis=1)
    fractions = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
    # Chi-square over 20 bins, 19 degrees of freedom: 43.8 is the 99.9 % point.
    for column in fractions.T:
        counts = np.bincount((column * 20).astype(int), minlength=20)
        assert ((counts - 1000) ** 2 / 1000).sum() < 43.8
    correlations = np.corrcoef(fractions.T) - np.eye(6)
    neighbours = [np.corrcoef(column[1:], column[:-1])[0, 1] for column in fractions.T]
    # Five standard deviations of a correlation of 20,000 pairs.
    assert np.abs([*correlations.flat, *neighbours]).max() < 5 / np.sqrt(20_000)


DRAWS: dict[str, Callable[[], float]] = {
    "random": random.random,
    "numpy": lambda: float(np.random.random()),  # noqa: NPY002
    "torch": lambda: float(torch.rand(())),
}


def seeded_draw(index: int, name: str) -> float:
    """Draw as the sample of an index does, with all generators seeded by its key."""
    for_python, for_numpy, for_torch = (int(word) for word in keys(indices=[index]).words(3)[0])
    random.seed(for_python)
    np.random.seed(for_numpy >> 32)  # noqa: NPY002
    torch.default_generator.manual_seed(for_torch)
    return DRAWS[name]()


def draws_of(index: int) -> list[str]:
    """Return the generators that a sample draws from: none, one or several."""
    return [name for bit, name in enumerate(DRAWS) if index >> bit & 1]


@pytest.mark.parametrize(
    "batches", [[range(8)], [[0], [1], [2], [4], [7]], [[7, 6], [5, 4, 3], [2, 1, 0]], [[0, 0], [3]]]
)
def test_a_sample_depends_on_its_key_only(batches: list[Sequence[int]]) -> None:
    reads: list[int] = []

    def sample(index: int) -> list[float]:
        reads.append(index)
        return [DRAWS[name]() for name in draws_of(index)]

    seeding = SampleSeeding()
    states = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index]  # noqa: NPY002
    found = [[*seeding.read(keys(indices=batch), sample)] for batch in batches]
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert np.array_equal(np.random.get_state()[1], states[2])  # type: ignore[index]  # noqa: NPY002
    expected = [[[seeded_draw(index, name) for name in draws_of(index)] for index in batch] for batch in batches]
    assert found == expected
    # A generator is found once, and then only the batch that has moved it is read again.
    reads.clear()
    seeding.read(keys(indices=batches[-1]), sample)
    assert reads == [*batches[-1]]


def test_the_initial_seed_of_torch_is_that_of_the_sample() -> None:
    expected = keys().words(3)[:, 2].tolist()
    assert SampleSeeding().read(keys(), lambda _: torch.initial_seed()) == expected


def test_a_normal_number_that_numpy_caches_leaves_no_sample() -> None:
    np.random.seed(5)  # noqa: NPY002
    expected = np.random.normal(size=2).tolist()  # noqa: NPY002
    np.random.seed(5)  # noqa: NPY002
    seeding = SampleSeeding()
    drawn = [seeding.read(keys(indices=[1]), lambda _: np.random.normal())[0] for _ in range(2)]  # noqa: NPY002
    assert drawn[0] == drawn[1]
    assert np.random.normal(size=2).tolist() == expected  # noqa: NPY002


def test_generators_are_put_back_after_an_error() -> None:
    states = random.getstate(), torch.get_rng_state()

    def sample(_: int) -> float:
        raise ValueError(f"{random.random()} {torch.rand(())}")

    with pytest.raises(ValueError, match="0"):
        SampleSeeding().read(keys(), sample)
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])


def mask(seed: int, step: int, rank: int) -> torch.Tensor:
    seed_step(seed, step, rank, torch.device("cpu"))
    return functional.dropout(torch.ones(256))


def test_dropout_masks_differ_between_ranks_steps_and_seeds_and_repeat() -> None:
    cases = list(itertools.product(range(2), range(3), range(4)))
    masks = [mask(*case) for case in cases]
    for (i, left), (j, right) in itertools.combinations(enumerate(masks), 2):
        assert not torch.equal(left, right), (cases[i], cases[j])
    assert all(torch.equal(mask(*case), expected) for case, expected in zip(cases, masks, strict=True))


def test_initialisation_is_the_same_every_time_and_in_every_version() -> None:
    seed_initialisation(3)
    first = torch.rand(4)
    seed_initialisation(3)
    assert torch.equal(torch.rand(4), first)
    assert keyed_seed("initialisation", 0) == 2034223615169407153
