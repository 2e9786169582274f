from __future__ import annotations

import math
import tracemalloc
from collections import Counter
from itertools import permutations

import numpy as np  # noqa: TID253
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.batch.order import SHUFFLE_LIMIT, KeyedOrder, TorchOrder, _Feistel


def inside_999(statistic: float, freedom: int) -> bool:
    """Whether a chi-square statistic lies in the two-sided 99.9 % band (Wilson and Hilferty 1931)."""
    spread = 2 / (9 * freedom)
    return abs(math.pow(statistic / freedom, 1 / 3) - (1 - spread)) < 3.2905 * math.sqrt(spread)


def whole(samples: int, seed: int, epoch: int) -> list[int]:
    return [int(index) for index in KeyedOrder(samples, seed, epoch)(np.arange(samples))]


def test_an_order_is_a_permutation_for_every_small_size() -> None:
    for samples in range(1, 1001):
        assert sorted(whole(samples, 3, samples)) == list(range(samples))


def test_the_network_alone_is_a_permutation_for_every_small_size() -> None:
    for samples in range(1, 1001):
        order = _Feistel(samples, b"key")(np.arange(samples, dtype=np.uint64))
        assert np.array_equal(np.sort(order), np.arange(samples))


@pytest.mark.parametrize("samples", [SHUFFLE_LIMIT, SHUFFLE_LIMIT + 1, 4225, 65_536, 65_537, 1_000_003])
def test_an_order_is_a_permutation_for_large_sizes(samples: int) -> None:
    assert np.array_equal(np.sort(KeyedOrder(samples, 0, 0)(np.arange(samples))), np.arange(samples))


@given(samples=st.integers(1, 2**62), seed=st.integers(0, 2**63 - 1), start=st.integers(0, 2**62))
def test_positions_of_an_order_of_any_size_stay_apart_and_in_range(samples: int, seed: int, start: int) -> None:
    start %= samples
    positions = np.arange(start, min(start + 100, samples), dtype=np.int64)
    indices = KeyedOrder(samples, seed, 0)(positions)
    assert len(set(indices.tolist())) == len(positions)
    assert indices.dtype == np.int64
    assert indices.min() >= 0
    assert indices.max() < samples


def test_golden_orders_never_change() -> None:
    # A change here breaks every run that resumes: it needs a new contract version.
    assert whole(10, 0, 0) == [5, 4, 3, 1, 9, 7, 8, 2, 0, 6]
    assert KeyedOrder(10**9, 1, 2)(np.arange(6)).tolist() == [
        835853041,
        308986182,
        268015240,
        516935912,
        526876480,
        343068415,
    ]
    assert KeyedOrder(5000, 7, 0)(np.arange(4990, 5000)).tolist() == [
        3172,
        2187,
        4512,
        3926,
        4041,
        2855,
        4005,
        654,
        840,
        4678,
    ]


def test_seed_and_epoch_are_no_sum() -> None:
    orders = {(seed, epoch): tuple(whole(50, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(set(orders.values())) == 16


def test_an_order_of_another_size_has_another_key() -> None:
    assert [index for index in whole(51, 0, 0) if index != 50] != whole(50, 0, 0)


@pytest.mark.parametrize("samples", [2, 3, 4, 5])
def test_all_orders_of_a_few_samples_are_equally_likely(samples: int) -> None:
    seeds = 12_000
    counts = Counter(tuple(whole(samples, seed, 0)) for seed in range(seeds))
    kinds = math.factorial(samples)
    assert set(counts) == set(permutations(range(samples)))
    statistic = sum((count - seeds / kinds) ** 2 for count in counts.values()) * kinds / seeds
    assert inside_999(statistic, kinds - 1)


@pytest.mark.parametrize("samples", [50, 97, 128])
@pytest.mark.parametrize("network", [False, True])
def test_index_against_position_is_uniform(samples: int, network: bool) -> None:  # noqa: FBT001
    seeds = 4000
    table = np.zeros((samples, samples))
    positions = np.arange(samples, dtype=np.int64)
    for seed in range(seeds):
        key = f"seed {seed}".encode()
        order = (
            _Feistel(samples, key)(positions.astype(np.uint64)) if network else KeyedOrder(samples, seed, 1)(positions)
        )
        table[positions, order.astype(np.int64)] += 1
    # Rows and columns of a permutation are tied: chi-square with (N-1)^2 degrees after the factor (N-1)/N.
    statistic = float(((table - seeds / samples) ** 2).sum()) * samples / seeds * (samples - 1) / samples
    assert inside_999(statistic, (samples - 1) ** 2)


@pytest.mark.parametrize("samples", [SHUFFLE_LIMIT + 1, 65_536, 10**9])
def test_neighbours_in_a_large_order_are_unrelated(samples: int) -> None:
    bins, epochs = 16, 100
    table = np.zeros((bins, bins))
    for epoch in range(epochs):
        indices = KeyedOrder(samples, 5, epoch)(np.arange(4000))
        cells = indices * bins // samples
        np.add.at(table, (cells[:-1:2], cells[1::2]), 1)
    expected = table.sum() / bins**2
    assert inside_999(float(((table - expected) ** 2).sum() / expected), bins**2 - 1)


def test_a_billion_samples_need_no_list() -> None:
    positions = np.arange(5 * 10**8, 5 * 10**8 + 256, dtype=np.int64)
    KeyedOrder(10**9, 0, 0)(positions)
    tracemalloc.start()
    try:
        KeyedOrder(10**9, 0, 1)(positions)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000


def test_an_order_may_be_entered_anywhere() -> None:
    order = KeyedOrder(10_000, 4, 2)
    assert np.array_equal(order(np.arange(10_000))[7000:7010], order(np.arange(7000, 7010)))


@pytest.mark.parametrize("position", [-1, 10])
@pytest.mark.parametrize("kind", [KeyedOrder, TorchOrder])
def test_a_position_outside_the_order_is_refused(kind: type[KeyedOrder | TorchOrder], position: int) -> None:
    with pytest.raises(IndexError, match=rf"positions of an order are 0\.\.9, not {position}\.\.{position}"):
        kind(10, 0, 0)(np.array([position]))


@pytest.mark.parametrize("samples", [0, -1, 2**62 + 1])
def test_an_order_of_impossible_size_is_refused(samples: int) -> None:
    with pytest.raises(ValueError, match=rf"an order has 1\.\.2\^62 samples, not {samples}"):
        KeyedOrder(samples, 0, 0)


def test_torch_order_is_that_of_randperm() -> None:
    import torch

    expected = torch.randperm(203, generator=torch.Generator().manual_seed(42 + 3))
    assert TorchOrder(203, 42, 3)(np.arange(203)).tolist() == expected.tolist()
