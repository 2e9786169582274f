from __future__ import annotations

from itertools import chain
from typing import Literal

import numpy as np  # noqa: TID253
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.batch.order import KeyedOrder
from hpcddp.batch.plan import PlanError, plan_batch
from hpcddp.batch.sampler import GlobalBatches, share_of
from hpcddp.jobfile.sections import Tail

sizes = st.integers(1, 300)


def epoch_of(batches: GlobalBatches, epoch: int) -> list[list[int]]:
    return [batches.indices(epoch, step).tolist() for step in range(batches.steps_per_epoch)]


def flat(batches: GlobalBatches, epoch: int) -> list[int]:
    return list(chain.from_iterable(epoch_of(batches, epoch)))


@given(samples=sizes, batch=sizes, epoch=st.integers(0, 5))
def test_an_epoch_that_keeps_its_tail_has_each_sample_once(samples: int, batch: int, epoch: int) -> None:
    steps = epoch_of(GlobalBatches(samples, batch, "keep", "keyed", 0), epoch)
    assert sorted(chain.from_iterable(steps)) == list(range(samples))
    assert all(len(step) == batch for step in steps[:-1])


@given(samples=sizes, batch=sizes)
def test_an_epoch_that_wraps_begins_its_order_again(samples: int, batch: int) -> None:
    order = flat(GlobalBatches(samples, batch, "wrap", "keyed", 0), 0)
    plan = plan_batch(global_batch_size=batch, world_size=1, samples=samples, tail="wrap")
    assert len(order) == samples + (plan.duplicated or 0)
    assert len(order) % batch == 0
    assert order == [order[position % samples] for position in range(len(order))]
    assert sorted(order[:samples]) == list(range(samples))


@given(samples=sizes, batch=sizes)
def test_an_epoch_that_drops_its_tail_repeats_nothing(samples: int, batch: int) -> None:
    if samples < batch:
        with pytest.raises(PlanError, match="an epoch would have no step"):
            GlobalBatches(samples, batch, "drop", "keyed", 0)
        return
    order = flat(GlobalBatches(samples, batch, "drop", "keyed", 0), 0)
    assert len(set(order)) == len(order) == samples - samples % batch


def test_each_epoch_drops_other_samples() -> None:
    batches = GlobalBatches(100, 32, "drop", "keyed", 0)
    dropped = [frozenset(range(100)) - set(flat(batches, epoch)) for epoch in range(5)]
    assert len(set(dropped)) == 5


@pytest.mark.parametrize("order", ["keyed", "torch"])
def test_a_batch_does_not_depend_on_what_was_asked_before(order: Literal["keyed", "torch"]) -> None:
    batches = GlobalBatches(203, 32, "keep", order, 1)
    first = batches.indices(2, 3)
    epoch_of(batches, 0)
    assert np.array_equal(batches.indices(2, 3), first)
    assert np.array_equal(GlobalBatches(203, 32, "keep", order, 1).indices(2, 3), first)


@pytest.mark.parametrize("tail", ["keep", "drop", "wrap"])
def test_batches_of_a_large_epoch_are_slices_of_its_order(tail: Tail) -> None:
    samples, batch = 9_500, 48
    batches = GlobalBatches(samples, batch, tail, "keyed", 3)
    for epoch in (0, 1):
        order = KeyedOrder(samples, 3, epoch)(np.arange(samples))
        # Forwards, then somewhere else, as a resumed training begins.
        steps = [*range(batches.steps_per_epoch), 7, batches.steps_per_epoch - 1, 100, 101, 0]
        for step in steps:
            positions = np.arange(step * batch, (step + 1) * batch)
            expected = order[positions[positions < samples] if tail == "keep" else positions % samples]
            assert batches.indices(epoch, step).tolist() == expected.tolist(), (epoch, step)


def test_torch_order_gives_the_batches_of_randperm() -> None:
    import torch

    expected = torch.randperm(203, generator=torch.Generator().manual_seed(7)).tolist()
    assert flat(GlobalBatches(203, 32, "keep", "torch", 5), 2) == expected


def test_a_step_beyond_the_epoch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"of an epoch is 0\.\.3, not 4"):
        GlobalBatches(100, 32, "keep", "keyed", 0).indices(0, 4)


@given(
    samples=sizes,
    batch=st.integers(1, 64),
    world=st.integers(1, 9),
    cap=st.none() | st.integers(1, 8),
    tail=st.sampled_from(["keep", "wrap"]),
)
def test_the_shares_of_all_ranks_are_the_global_batch(
    samples: int, batch: int, world: int, cap: int | None, tail: Literal["keep", "wrap"]
) -> None:
    batch = max(batch, world)
    plan = plan_batch(
        global_batch_size=batch, world_size=world, samples=samples, max_per_device_batch_size=cap, tail=tail
    )
    batches = GlobalBatches(samples, batch, tail, "keyed", 0)
    for step in range(batches.steps_per_epoch):
        indices = batches.indices(0, step)
        shares = [share_of(plan, indices, rank) for rank in range(world)]
        assert tuple(tuple(len(micro) for micro in share) for share in shares) == plan.share(len(indices))
        assert np.array_equal(np.concatenate([micro for share in shares for micro in share]), indices)
