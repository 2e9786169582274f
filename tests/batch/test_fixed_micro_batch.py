from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import numpy as np  # noqa: TID253
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.batch.explain import explain
from hpcddp.batch.job import plan_numbers
from hpcddp.batch.plan import BatchPlan, PlanError, plan_batch, refuse_single_sample
from hpcddp.batch.sampler import share_of
from tests.messages import GoldenMessages


def fixed(**numbers: Any) -> BatchPlan:
    return plan_batch(**{"global_batch_size": 24, "world_size": 2, "samples": None, **numbers})


@pytest.mark.parametrize(("world_size", "steps"), [(1, 6), (2, 3), (3, 2), (6, 1)])
def test_accumulation_follows_from_the_world_size(world_size: int, steps: int) -> None:
    plan = fixed(world_size=world_size, per_device_batch_size=4)
    assert plan.grad_accum_steps == steps
    assert plan.micro_batches == ((4,) * steps,) * world_size
    assert plan.imbalance == 0


@given(
    chunks=st.integers(1, 24),
    size=st.integers(1, 9),
    world=st.integers(1, 24),
    data=st.data(),
    samples=st.integers(1, 500),
)
def test_micro_batches_are_the_same_for_every_world_size(
    chunks: int, size: int, world: int, data: Any, samples: int
) -> None:
    batch = data.draw(st.integers(0, chunks * size))
    if chunks % world:
        return
    one, many = (
        plan_batch(global_batch_size=chunks * size, world_size=w, samples=samples, per_device_batch_size=size)
        for w in (1, world)
    )
    indices = np.arange(batch)
    (alone,) = [share_of(one, indices, 0)]
    spread = [share for rank in range(world) for share in share_of(many, indices, rank)]
    assert [share.tolist() for share in alone] == [share.tolist() for share in spread]
    sizes = [len(share) for share in spread]
    assert sum(sizes) == batch
    assert all(found == size for found in sizes[: batch // size])
    assert [sum(share) for share in many.share(batch)] == list(many.shares(batch))
    bounds = list(accumulate((sum(share) for share in many.share(batch)), initial=0))
    assert [many.rank_offset(batch, rank) for rank in range(world)] == [begin for begin, _ in pairwise(bounds)]


@given(batch=st.integers(0, 60), world=st.integers(1, 7), cap=st.integers(1, 5), fixed_size=st.booleans())
def test_what_all_ranks_have_in_a_micro_step_is_the_sum_of_their_shares(
    batch: int, world: int, cap: int, *, fixed_size: bool
) -> None:
    numbers: dict[str, Any] = {"per_device_batch_size" if fixed_size else "max_per_device_batch_size": cap}
    plan = fixed(global_batch_size=60 * world * cap, world_size=world, **numbers)
    assert plan.micro_steps(batch) == [sum(column) for column in zip(*plan.share(batch), strict=True)]


def test_a_short_last_batch_is_told_as_it_is() -> None:
    plan = plan_batch(global_batch_size=512, world_size=2, samples=5000, per_device_batch_size=32)
    text = explain(plan_numbers(plan, epochs=1, learning_rate=0.1))
    assert "accumulation     8 micro-steps per optimizer step; 32 " in text
    assert "    rank 1         136 samples = 4 x 32 + 1 x 8 + 3 x 0\n" in text


def test_a_batch_that_it_does_not_fill_is_refused_with_the_ways_out(golden: GoldenMessages) -> None:
    with pytest.raises(PlanError) as caught:
        fixed(global_batch_size=512, world_size=4, per_device_batch_size=48)
    message = golden.message(caught.value)
    assert message.startswith("per_device_batch_size is 48, ")
    assert "4 ranks make 192 " in message
    assert "global_batch_size 512; " in message
    assert message.endswith("; write global_batch_size 384 or 576")


@given(batch=st.integers(1, 3000), world=st.integers(1, 40), size=st.integers(1, 400))
def test_every_way_out_works(batch: int, world: int, size: int) -> None:
    if batch < world or batch % (world * size) == 0:
        return
    with pytest.raises(PlanError) as caught:
        fixed(global_batch_size=batch, world_size=world, per_device_batch_size=size)
    for number in caught.value.message.partition("; write global_batch_size ")[2].split(" or "):
        if int(number) >= world:
            fixed(global_batch_size=int(number), world_size=world, per_device_batch_size=size)


@pytest.mark.parametrize("other", ["grad_accum_steps", "max_per_device_batch_size"])
def test_what_it_decides_is_refused_beside_it(other: str, golden: GoldenMessages) -> None:
    with pytest.raises(PlanError) as caught:
        fixed(per_device_batch_size=4, **{other: 3})
    message = golden.message(caught.value)
    assert message.startswith(f"{other} is 3, ")
    assert "per_device_batch_size, which is 4; keep one" in message


def test_a_last_micro_batch_of_one_sample_is_found_where_it_is(golden: GoldenMessages) -> None:
    plan = fixed(per_device_batch_size=4, samples=24 + 17)
    with pytest.raises(PlanError) as caught:
        refuse_single_sample(plan)
    message = golden.message(caught.value)
    assert message.startswith("step 1 of every epoch has 17 ")
    assert "rank 1 one sample in micro-step 1," in message
    assert "use tail 'drop' or train.batch_norm sync or " in message
